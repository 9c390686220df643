"""`python -m services.gateway --config gateway.yaml`: Tinker's HTTP API over the services."""

from __future__ import annotations

import sys

import uvloop

from services.gateway.config import GatewayConfig
from services.gateway.process import GatewayProcess
from sluice import logs
from sluice.config import ConfigError, load_config
from sluice.durable import DirectoryError
from sluice.imports import run_process


async def serve(config: GatewayConfig) -> int:
    process = GatewayProcess(config)  # built inside the loop that its server belongs to
    await process.run()
    return 1 if process.server.failed else 0


def main() -> int:
    logs.configure()
    try:
        config = load_config(GatewayConfig)
        return uvloop.run(serve(config))
    except (ConfigError, DirectoryError) as error:
        print(f"services.gateway: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_process(main)
