"""What a converter process is told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from sluice.config import ProcessConfig
from sluice.runtime.server import ServerConfig


class ConverterConfig(ProcessConfig):
    """Converter service: checkpoints between HF and torch_dist."""

    roots: list[Path] = Field(
        min_length=1, description="Directories below which checkpoints are read and written."
    )
    max_running: int = Field(1, ge=1, description="Conversions at a time; others wait.")
    workers: int = Field(2, ge=1, description="Threads of one conversion.")
    durable: bool = Field(True, description="Files are on the disk before a target appears.")
    server: ServerConfig = ServerConfig()
