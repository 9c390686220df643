"""Rank processes of this host: what they are handed, and that nobody else can have it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from services.trainer.config import TrainerConfig
from services.trainer.controller.launch import LocalLauncher
from sluice.config import parse_config


async def test_where_ranks_meet_is_taken_before_any_of_them_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[list[int]] = []
    start = asyncio.create_subprocess_exec

    async def start_after_a_thief(
        *command: str, env: dict[str, str], pass_fds: list[int], **options: Any
    ) -> asyncio.subprocess.Process:
        address = (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        with socket.socket() as thief, pytest.raises(OSError, match="already in use"):
            thief.bind(address)
        handed.append(pass_fds)
        if pass_fds:
            with socket.socket(fileno=os.dup(int(env["MASTER_LISTEN_FD"]))) as meeting:
                assert meeting.getsockname() == address
        return await start("sleep", "60", env=env, pass_fds=pass_fds, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_after_a_thief)
    (tmp_path / "config.json").write_text("{}")
    values = {"model": str(tmp_path), "store": str(tmp_path), "ranks": {"count": 2}}
    launcher = LocalLauncher(parse_config(TrainerConfig, values))
    await launcher.launch(1, "127.0.0.1:1", lambda loss: None)
    await launcher.close()
    assert [len(descriptors) for descriptors in handed] == [1, 0]
