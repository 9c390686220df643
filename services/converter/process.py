"""One converter process: its server and its servicer."""

from __future__ import annotations

from services.converter.config import ConverterConfig
from services.converter.servicer import ConverterServicer
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.runtime.server import Server

SERVICE = "sluice.api.converter.v1.ConverterService"


class ConverterProcess:
    def __init__(self, config: ConverterConfig) -> None:
        self.server = Server(config.server)
        self._servicer = ConverterServicer(config, self.server)
        self.server.add(pb_grpc.add_ConverterServiceServicer_to_server, self._servicer, SERVICE)

    async def run(self) -> None:
        """Serve until a signal."""
        self.server.stop_on_signals()
        await self.start()
        try:
            await self.server.run_until_signal()
        finally:
            self.close()

    async def start(self) -> None:
        await self.server.start()
        await self.server.set_serving()

    def close(self) -> None:
        """Let go of everything; the server has stopped before."""
        self._servicer.close()
