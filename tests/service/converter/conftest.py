"""A converter in a process of its own, which tests may kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sluice import faults
from sluice.convert_command import ConverterClient
from tests.patience import PATIENCE
from tests.unit.weights_rules.models import save_model


class Converter:
    """Starts, kills and starts again; `root` is the only directory that it may touch, and `roots`
    are that and more."""

    def __init__(self, root: Path) -> None:
        self.root, self.faults = root, root.with_name("faults")
        self.roots = [str(root)]
        self._file = root.with_name("address.json")
        self._process: asyncio.subprocess.Process | None = None
        self.client: ConverterClient | None = None

    async def start(self, *flags: str) -> ConverterClient:
        self._file.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.converter", "--roots", json.dumps(self.roots)),
            *("--server.address_file", str(self._file), "--workers", "1", *flags),
            env={
                **os.environ,
                "PYTHONPATH": os.getcwd(),
                "OMP_NUM_THREADS": "1",
                faults.VARIABLE: str(self.faults),
            },
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(PATIENCE):
            while not self._file.exists():
                assert self._process.returncode is None
                await asyncio.sleep(0.02)
        self.client = ConverterClient(json.loads(self._file.read_text())["address"])
        return self.client

    def hold(self, point: str) -> None:
        """Conversions wait at this point of `sluice.faults`, whose file is a pipe from now on."""
        (self.faults / point).unlink(missing_ok=True)
        os.mkfifo(self.faults / point)

    def let_go(self, point: str, passing: int = 1_000_000) -> None:
        """Go on from `hold`, once a conversion is there; it dies (-9) at this passing from now."""
        path = self.faults / point
        with path.open("w") as pipe:  # waits for its reader
            path.unlink()
            pipe.write(f"{passing} {signal.SIGKILL:d}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        """Wait for the process to end by itself."""
        assert self._process is not None
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; the exit code."""
        if self.client is not None:
            await self.client.close()
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self.ended()


@pytest_asyncio.fixture
async def converter(tmp_path: Path) -> AsyncIterator[Converter]:
    (tmp_path / "root").mkdir()
    (tmp_path / "faults").mkdir()
    made = Converter(tmp_path / "root")
    yield made
    if made.client is not None:
        await made.stop(signal.SIGKILL)


@pytest.fixture
def model(converter: Converter) -> Path:
    return save_model("qwen3", converter.root / "model")
