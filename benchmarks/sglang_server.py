"""An SGLang server on CPU, in a virtual environment of its own, for side by side measurements."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.sglang.servers import command, engine_arguments, environment
from sluice import platform

START_SECONDS, POLL_SECONDS, REQUEST_SECONDS = 900, 1.0, 900
CACHE_TOKENS = 16384
STOP_SECONDS = 20


class Timing(NamedTuple):
    cpu_seconds: float
    wall_seconds: float


class SglangServer:
    """Runs while the context is open; one thread computes."""

    def __init__(self, python: str, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        config = EngineConfig(backend="sglang", threads=1, prefix_cache_tokens=0, max_running=64)
        device = platform.CPU.device_type
        arguments = {
            **engine_arguments(config, device),
            "max_total_tokens": CACHE_TOKENS,
            "skip_tokenizer_init": True,
            "model_path": model,
            "host": "127.0.0.1",
            "port": self._port,
        }
        self._command = command(python, arguments)
        self._environment = {**os.environ, **environment(config, device)}

    def __enter__(self) -> SglangServer:
        self._process = psutil.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError("the SGLang server did not start")
            time.sleep(POLL_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        family: list[psutil.Process] = [*self._process.children(recursive=True), self._process]
        for process in family:
            process.terminate()
        for process in psutil.wait_procs(family, timeout=STOP_SECONDS)[1]:
            process.kill()

    def timed(self, prompts: list[list[int]], lengths: list[int]) -> Timing:
        """All prompts in one request, each to its own length."""
        body = {
            "input_ids": prompts,
            "sampling_params": [
                {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
                for length in lengths
            ],
        }
        wall, cpu = time.monotonic(), self._cpu_seconds()
        answers = self._call("/generate", body)
        timing = Timing(self._cpu_seconds() - cpu, time.monotonic() - wall)
        assert [len(answer["output_ids"]) for answer in answers] == lengths
        return timing

    def _cpu_seconds(self) -> float:
        times = [p.cpu_times() for p in (self._process, *self._process.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def _answers(self) -> bool:
        try:
            self._call("/model_info", None)
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _call(self, path: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=data,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return json.load(response)
