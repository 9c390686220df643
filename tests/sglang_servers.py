"""Real SGLang servers for tests, each started once and shared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang.servers import (
    SHIM,
    command,
    engine_arguments,
    environment,
    model_arguments,
)
from services.rollout.engine.sglang.weights import read_config
from sluice.ports import free_port
from tests.patience import PATIENCE

PYTHON = Path(__file__).parent.parent / "build" / "sglang" / "bin" / "python"
DEVICE = "cpu"
START_SECONDS = 3 * PATIENCE  # the first one of a checkout compiles thousands of modules


class SharedServers:
    """Servers by model directory and arguments; `close` ends them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._found: dict[tuple[Path, str], str] = {}

    def url(self, model: Path, **arguments: Any) -> str:
        """Of a server for this model; it may hold other weights of the same shape."""
        key = (model, repr(sorted(arguments.items())))
        if key not in self._found:
            self._found[key] = self._start(model, arguments)
        return self._found[key]

    def close(self) -> None:
        for process in self._processes:  # also those that did not answer in time
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=PATIENCE)

    def _start(self, model: Path, arguments: dict[str, Any]) -> str:
        assert PYTHON.exists(), "run `make sglang-cpu` first"
        config = EngineConfig(backend="sglang", threads=1, max_cached_tokens=16384)
        port = free_port("127.0.0.1")
        words = command(
            PYTHON,
            {
                **engine_arguments(config, DEVICE),
                **model_arguments(config, read_config(model)),
                "model_path": model,
                "host": "127.0.0.1",
                "port": port,
                **arguments,
            },
        )
        log = (self._logs / f"sglang-{port}.log").open("wb")
        process = subprocess.Popen(
            [str(PYTHON), str(SHIM), str(os.getpid()), *words],
            env={**os.environ, **environment(config, DEVICE, arguments.get("dp_size", 1))},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._processes.append(process)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.poll() is None, (self._logs / f"sglang-{port}.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "SGLang did not start"
            time.sleep(0.2)
        return url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=30):
            return True
    except (urllib.error.URLError, OSError):
        return False
