"""Decode passes that were captured once and are replayed: one launch in place of hundreds.

A graph is of a shape: the sizes of rows that lanes are in, each with a number of lanes rounded up
to the next bucket. It reads weights and cache where they lay when it was captured, so that other
weights end all graphs, and a store that grew those that read it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.rollout import metrics
from services.rollout.engine.reference.attention import DecodeBlock, ForwardPlan
from services.rollout.engine.reference.model import ServingModel
from sluice import platform

MET = 4  # plain passes of a shape before it is captured: not every shape comes again
MOST = 64  # graphs that are kept; the one used last goes last

Key = tuple[tuple[int, int], ...]  # (tokens of a row, bucket of lanes) of each block


def bucket(count: int) -> int:
    """Returns the lanes that a graph for `count` lanes has: a power of two."""
    return 1 << (count - 1).bit_length()


def obstacle(model: ServingModel | None) -> str:
    """Returns why decode passes of this model, or of any here, cannot be captured; or nothing."""
    device = platform.current()
    if not device.can_capture:
        return f"nothing is captured on {device.device_type}"
    return "" if model is None else model.capture_obstacle


@dataclass(frozen=True)
class _Graph:
    """tokens, places: int64[lanes with padding], what a replay reads; logits: what it writes.

    run: what was captured. It holds whatever else a replay reads: memory that was there before a
    capture is not held by it, and would be somebody else's.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]
    run: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The graphs of one model and its cache. Of the device thread."""

    def __init__(self, model: ServingModel) -> None:
        self._model = model
        self._pool: Any = None  # of the graphs that there are
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._met: Counter[Key] = Counter()
        self._kv: dict[int, torch.Tensor] = {}  # that graphs read, by tokens of a row

    def clear(self) -> None:
        """Forgets all: weights lie elsewhere from now on."""
        self._graphs.clear()
        self._met.clear()
        self._kv.clear()

    def run(self, tokens: torch.Tensor, blocks: Sequence[DecodeBlock]) -> torch.Tensor | None:
        """Computes logits float32[lanes, V] of lanes in their order; None for a plain pass.

        tokens: int64[lanes]. They stay as they are until the next pass.
        """
        key = tuple((block.capacity, bucket(block.count)) for block in blocks)
        self._forget_moved(blocks)
        graph = self._graphs.get(key)
        if graph is None:
            self._met[key] += 1
            if self._met[key] <= MET:
                metrics.DECODE_PASSES.labels("plain").inc()
                return None
            graph = self._capture(key, tokens, blocks)
        self._graphs.move_to_end(key)
        _write(graph.tokens, graph.places, tokens, blocks)
        graph.replay()
        metrics.DECODE_PASSES.labels("replayed").inc()
        parts, first = [], 0
        for (_, lanes), block in zip(key, blocks, strict=True):
            parts.append(graph.logits[first : first + block.count])
            first += lanes
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forget_moved(self, blocks: Sequence[DecodeBlock]) -> None:
        for block in blocks:
            if self._kv.get(block.capacity, block.kv) is not block.kv:
                gone = [key for key in self._graphs if block.capacity in dict(key)]
                for key in gone:
                    del self._graphs[key]
            self._kv[block.capacity] = block.kv

    def _capture(self, key: Key, drawn: torch.Tensor, blocks: Sequence[DecodeBlock]) -> _Graph:
        model, device = self._model, self._model.cache_shape.device
        width = sum(lanes for _, lanes in key)
        tokens = torch.zeros(width, dtype=torch.int64, device=device)
        places, keep = torch.zeros_like(tokens), torch.arange(width, device=device)
        _write(tokens, places, drawn, blocks)  # it runs while it is captured
        padded, slots, first = [], [], 0
        for (capacity, lanes), block in zip(key, blocks, strict=True):
            mine = places[first : first + lanes]
            first += lanes
            heads = block.kv.shape[3]
            slots.append(torch.arange(lanes * heads, device=device) * capacity)
            padded.append(DecodeBlock(block.kv, mine, mine, capacity, capacity, uniform=False))
        plan = ForwardPlan(tuple(padded))

        def run() -> torch.Tensor:
            for each, rows in zip(padded, slots, strict=True):
                each.masks.clear()
                each.slots = rows + each.positions.repeat_interleave(each.kv.shape[3])
            return model.forward(tokens, places.expand(3, -1), plan, keep)

        if not self._graphs:
            self._pool = platform.current().capture_pool()
        graph = _Graph(tokens, places, *platform.current().capture(run, self._pool), run)
        metrics.DECODE_PASSES.labels("captured").inc()
        self._graphs[key] = graph
        while len(self._graphs) > MOST:
            self._graphs.popitem(last=False)
        return graph


def _write(
    tokens: torch.Tensor,
    places: torch.Tensor,
    drawn: torch.Tensor,
    blocks: Sequence[DecodeBlock],
) -> None:
    """Fills in what a graph reads; a lane that pads stands at the beginning of a free row."""
    first = seen = 0
    for block in blocks:
        end, last = first + block.count, first + bucket(block.count)
        tokens[first:end].copy_(drawn[seen : seen + block.count])
        places[first:end].copy_(block.positions)
        if end < last:
            tokens[end:last].zero_()
            places[end:last].zero_()
        first, seen = last, seen + block.count
