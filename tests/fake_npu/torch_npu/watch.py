"""Counts calls, of this package and of torch.cuda, and writes them down for other processes."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

calls: Counter[str] = Counter()
_writing = threading.RLock()


def count(name: str) -> None:
    calls[name] += 1
    if calls[name] == 1:
        write()


def write() -> None:
    directory = os.environ.get("FAKE_NPU_CALLS")
    if not directory:
        return
    path = Path(directory, f"{os.getpid()}.json")
    partial = path.with_suffix(".partial")
    with _writing:  # readers see a whole file, and the latest
        partial.write_text(json.dumps(calls, sort_keys=True))
        partial.rename(path)


def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, counted with the package of its caller."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        count(f"{name}:{caller.partition('.')[0]}")
        return function(*args, **kwargs)

    return call


def watch_cuda() -> None:
    module = torch.get_device_module("cuda")
    for name, value in list(vars(module).items()):
        if inspect.isfunction(value) and not name.startswith("_"):
            setattr(module, name, counted(value, f"cuda.{name}"))
    torch.Tensor.cuda = counted(torch.Tensor.cuda, "cuda.Tensor")
    torch.nn.Module.cuda = counted(torch.nn.Module.cuda, "cuda.Module")


atexit.register(write)
