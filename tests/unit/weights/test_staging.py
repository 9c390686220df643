"""Directories in the making that end while a rank still writes into them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.weights.staging import Staging, close_staging, open_staging, sweep_staging


def close(staging: Staging) -> None:
    close_staging(staging)


def sweep(staging: Staging) -> None:
    staging.lock.close()  # what the kernel does when its owner dies
    sweep_staging(staging.directory.parent)


@pytest.fixture(params=[close, sweep])
def end(request: pytest.FixtureRequest) -> Callable[[Staging], None]:
    found: Callable[[Staging], None] = request.param
    return found


def before_rmdir(patch: pytest.MonkeyPatch, write: Callable[[], None]) -> None:
    """Once, when a directory was emptied and is about to be removed."""
    real = os.rmdir

    def rmdir(*arguments: Any, **options: Any) -> None:
        patch.setattr(os, "rmdir", real)
        write()
        real(*arguments, **options)

    patch.setattr(os, "rmdir", rmdir)


def test_a_rank_that_still_writes_finds_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Staging], None]
) -> None:
    staging = open_staging(tmp_path, 1, None)
    (staging.directory / "a.safetensors").touch()

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            (staging.directory / "b.safetensors").touch()

    before_rmdir(monkeypatch, write)
    end(staging)
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_wrote_to_the_last_is_left_for_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Staging], None]
) -> None:
    """It had found the directory before."""
    staging = open_staging(tmp_path, 1, None)
    found = os.open(staging.directory, os.O_RDONLY)

    def write() -> None:
        os.close(os.open("a.safetensors", os.O_CREAT | os.O_WRONLY, dir_fd=found))

    before_rmdir(monkeypatch, write)
    end(staging)
    os.close(found)
    assert [path.name for path in tmp_path.glob("*.lock")] == [staging.directory.name + ".lock"]
    assert sweep_staging(tmp_path) == [staging.directory]
    assert list(tmp_path.iterdir()) == []
