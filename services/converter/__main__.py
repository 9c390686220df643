"""`python -m services.converter --config converter.yaml`: checkpoints between formats."""

from __future__ import annotations

import sys

import uvloop

from services.converter.servicer import ConverterConfig, ConverterServicer
from sluice import logs
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.config import ConfigError, load_config
from sluice.imports import import_named, keep_loaded, run_process
from sluice.place import directory_of
from sluice.runtime.server import Server

SERVICE = "sluice.api.converter.v1.ConverterService"


async def serve(config: ConverterConfig) -> None:
    """Serve until a signal."""
    server = Server(config.server)
    directories = [directory_of(root) for root in config.roots]
    if roots := [root for root in directories if root is not None]:
        server.disks["roots"] = roots
    if config.scratch is not None:
        server.disks["scratch"] = [config.scratch]
    servicer = ConverterServicer(config, server)
    server.add(pb_grpc.add_ConverterServiceServicer_to_server, servicer, SERVICE)
    server.stop_on_signals()
    await server.start()
    import_named("sluice.weights.convert.placed:convert_places")  # torch: not by the first call
    import_named("torch:set_num_threads")(1)  # threads of a conversion are its own
    keep_loaded()
    await server.set_serving()
    try:
        await server.run_until_signal()
    finally:
        servicer.close()


def main() -> int:
    logs.configure()
    try:
        config = load_config(ConverterConfig)
        uvloop.run(serve(config))
    except ConfigError as error:
        print(f"services.converter: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_process(main)
