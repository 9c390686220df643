"""A thread that waits is told of by the line it waits at, and by who had it wait."""

from __future__ import annotations

import threading

import torch

from sluice.runtime.stacks import standing
from tests.patience import PATIENCE


class Waiting(torch.autograd.Function):
    """Waits within torch, and within the standard library."""

    @staticmethod
    def forward(_: object, value: torch.Tensor, begun: threading.Event, go_on: threading.Event):
        begun.set()
        go_on.wait(PATIENCE)
        return value


def hold_up(begun: threading.Event, go_on: threading.Event) -> None:
    Waiting.apply(torch.ones(1), begun, go_on)


def test_a_waiting_thread_is_told_by_lines_of_those_who_wait():
    begun, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold_up, args=(begun, go_on))
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        told = standing(thread.ident)
    finally:
        go_on.set()
        thread.join()
    innermost, _, callers = told.partition(", called by ")
    assert innermost.startswith("threading:") and innermost.endswith(" wait")
    line = hold_up.__code__.co_firstlineno + 1
    assert callers.split(", ")[1] == f"{__name__}:{line} hold_up"
    assert "torch." not in callers and "threading:" not in callers
    assert standing(thread.ident) == standing(None) == ""


def test_however_deep_it_is_a_line_is_short():
    def dig(depth: int) -> str:
        return dig(depth - 1) if depth else standing(threading.get_ident())

    told = dig(200)
    assert told.count(" dig") == 3 and len(told) < 300
