"""Requests and their running samples, which are one batch: columns, draws and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import pad

from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    Sampling,
    ServedWeights,
    Timing,
)
from services.rollout.engine.reference.attention import (
    Block,
    CacheRows,
    CacheShape,
    DecodeBlock,
    PaddingBlock,
    PrefillPrompt,
)
from services.rollout.engine.reference.drawing import (
    Drawn,
    DrawSettings,
    Outputs,
    Written,
    draw,
    draw_fixed,
)
from sluice.samples.sample import VersionSpan
from sluice.samples.stops import StopSearch

TopTokens = tuple[tuple[int, float], ...]  # likeliest first, with log-probabilities


@dataclass(eq=False)
class Request:
    """A generation: samples 0..started-1 have begun, `ended` of them have finished."""

    key: int
    generation: Generation
    prompt: PrefillPrompt
    pinned: bool  # to the weights of its prompt; others follow those that serve
    seeds: tuple[int, ...]
    stops: tuple[int, ...]
    budget: int  # tokens each sample may have
    searches: Sequence[StopSearch] = ()  # one per sample, where there are stop strings
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    started: int = 0
    ended: int = 0

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def sampling(self) -> Sampling:
        return self.generation.sampling

    @property
    def unstarted(self) -> int:
        return self.generation.sample_count - self.started

    @property
    def samples_to_start(self) -> int:
        """Samples that will take a slot."""
        return self.unstarted

    @property
    def reserved(self) -> int:
        """Cache tokens one sample may come to use."""
        return self.prompt.length + self.budget


@dataclass(eq=False)
class Scoring:
    """Log-probabilities wanted of the prompt's tokens from `first` on, gathered by chunk."""

    key: int
    prompt: PrefillPrompt
    pinned: bool
    first: int
    top_count: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    unstarted: int = 1  # it counts like a sample while it waits,
    samples_to_start: int = 0  # but takes no slot
    reserved: int = 0


@dataclass(eq=False)
class Lane:
    """A running sample. `versions` says from which of its tokens on each version drew."""

    request: Request
    index: int
    slot: int = 0  # in the outputs
    sent: int = 0  # tokens already handed out
    began: float = 0.0  # when its first token was drawn; 0: never
    searched: int = 0  # tokens in which stop strings were looked for
    has_stop: bool = False  # a stop string is complete
    prompt_experts: torch.Tensor | None = None  # int16[prompt, mixture layers, chosen]
    versions: list[tuple[int, ServedWeights]] = field(default_factory=list)

    @property
    def tempered(self) -> bool:
        return self.request.sampling.temperature not in (0, 1)

    def mark(self, count: int, version: ServedWeights) -> None:
        """Notes that tokens from number `count` on come from `version`."""
        if self.versions and self.versions[-1][0] == count:
            self.versions.pop()
        self.versions.append((count, version))

    def delta(self, written: Written, finish_reason: FinishReason | None) -> Delta:
        """Returns the tokens that follow those already sent."""
        first, self.sent = self.sent, self.sent + len(written.token_ids)
        return Delta(
            index=self.index,
            token_ids=written.token_ids,
            logprobs=written.logprobs,
            logprobs_t1=written.logprobs_t1,
            spans=self._spans(first, self.sent),
            finish_reason=finish_reason,
            timing=self._timing() if finish_reason else None,
            routed_experts=self._experts(written) if finish_reason else None,
        )

    def _experts(self, written: Written) -> np.ndarray | None:
        """Returns the experts of the prompt and of all drawn tokens but the last."""
        if self.prompt_experts is None:
            return None
        parts = [self.prompt_experts]
        if written.experts is not None:  # None: nothing has been decoded yet
            parts.append(written.experts)
        return torch.cat(parts).cpu().numpy()

    def _timing(self) -> Timing:
        """Returns the timing of a sample that ends now."""
        now, request = time.monotonic(), self.request
        admitted = request.admitted or now
        began = self.began or now
        return Timing(
            queue=admitted - request.arrived, prefill=began - admitted, decode=now - began
        )

    def _spans(self, first: int, end: int) -> tuple[VersionSpan, ...]:
        if first == end:
            return ()
        if len(self.versions) == 1:
            return (_span(*self.versions[0][1], first, end - 1),)
        untils = [*(begin for begin, _ in self.versions[1:]), end]
        return tuple(
            _span(version, digest, base, max(begin, first), min(until, end) - 1)
            for (begin, (version, digest, base)), until in zip(self.versions, untils, strict=True)
            if max(begin, first) < min(until, end)
        )


@lru_cache(maxsize=1024)  # siblings that end together have equal ones
def _span(version: int, digest: str, base: str, first: int, last: int) -> VersionSpan:
    return VersionSpan(
        version=version, digest=digest, base_digest=base, first_token=first, last_token=last
    )


@dataclass(frozen=True)
class Columns:
    """One row per lane, int64[B] where not said otherwise.

    tokens: drawn last, not yet in the cache; positions: where it stands; shifts: how far off that
    its rotary position is, behind images; counts: tokens drawn; budgets: tokens allowed; minimums:
    tokens before which no lane ends; slots: in the outputs; stops: int64[B, S], filled up with -1.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    shifts: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
    minimums: torch.Tensor
    slots: torch.Tensor
    stops: torch.Tensor
    settings: DrawSettings

    @staticmethod
    def of(
        requests: Sequence[Request],
        repeats: torch.Tensor,
        tokens: torch.Tensor,
        slots: Sequence[int],
        settings: DrawSettings,
    ) -> Columns:
        """Makes lanes with their first token: repeats[i] of requests[i]."""

        def column(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            each = torch.tensor(values, dtype=torch.int64, device=tokens.device)
            return each.repeat_interleave(repeats, 0)

        return Columns(
            tokens=tokens,
            positions=column([request.prompt.length for request in requests]),
            shifts=column([request.prompt.shift for request in requests]),
            counts=torch.ones_like(tokens),
            budgets=column([request.budget for request in requests]),
            minimums=column([request.sampling.min_new_tokens for request in requests]),
            slots=torch.tensor(slots, device=tokens.device),
            stops=column(_filled([request.stops for request in requests])),
            settings=settings,
        )

    def select(self, rows: torch.Tensor) -> Columns:
        return _columns([column[rows] for column in self._plain()], self.settings.select(rows))

    def joined(self, other: Columns) -> Columns:
        width = max(self.stops.shape[1], other.stops.shape[1])
        mine, theirs = self._plain(width), other._plain(width)
        plain = [torch.cat(pair) for pair in zip(mine, theirs, strict=True)]
        return _columns(plain, self.settings.joined(other.settings))

    def stopped(self) -> torch.Tensor:
        """bool[B]: the last token is a stop token."""
        return (self.tokens[:, None] == self.stops).any(1)

    def forbidden(self) -> torch.Tensor:
        """int64[B, S]: the stop tokens of lanes whose next token may not end them; -1 else."""
        return self.stops.masked_fill((self.counts >= self.minimums)[:, None], -1)

    def advance(self, tokens: torch.Tensor) -> None:
        """Adds one more token to every lane."""
        self.tokens.copy_(tokens)
        self.positions.add_(1)
        self.counts.add_(1)

    def _plain(self, stops: int = 0) -> tuple[torch.Tensor, ...]:
        wide = pad(self.stops, (0, max(0, stops - self.stops.shape[1])), value=-1)
        return (
            self.tokens,
            self.positions,
            self.shifts,
            self.counts,
            self.budgets,
            self.minimums,
            self.slots,
            wide,
        )


def _filled(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of one length, filled up with -1."""
    widest = max(map(len, rows))
    return [[*row, *[-1] * (widest - len(row))] for row in rows]


def _columns(plain: Sequence[torch.Tensor], settings: DrawSettings) -> Columns:
    tokens, positions, shifts, counts, budgets, minimums, slots, stops = plain
    return Columns(tokens, positions, shifts, counts, budgets, minimums, slots, stops, settings)


Deltas = list[tuple[Lane, Delta]]


class DecodeBatch:
    """Lanes in packed order, which is that of the rows they have in the cache.

    With `fixed_rows` every pass has that many rows and every sample attends to its whole row,
    so that shapes, and with them rounding, do not depend on who else runs.
    """

    def __init__(
        self,
        shape: CacheShape,
        max_length: int,
        fixed_rows: int = 0,
        pad_rows: Callable[[int], int] | None = None,
    ) -> None:
        """`pad_rows`: the cache has memory for so many rows of a size as it makes of theirs."""
        self.lanes: list[Lane] = []
        self.streaming = False  # some lane wants its tokens as they come
        self._searching = False  # some lane has stop strings
        self._holding = False  # some lane has tokens before which it does not end
        self._broken = set[int]()  # requests with logits that are not finite, by key
        self._device, self._fixed_rows = shape.device, fixed_rows
        self._rows = CacheRows(shape, max_length, pad_rows)
        self._outputs = Outputs(shape.device)
        self._columns: Columns | None = None
        self._blocks: list[DecodeBlock] = []
        self._steps_left = 0  # until the first lane has used up its budget

    def __len__(self) -> int:
        return len(self.lanes)

    @property
    def width(self) -> int:
        """Rows of a pass."""
        return (self._fixed_rows or len(self.lanes)) if self.lanes else 0

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, list[Block]]:
        """Returns tokens and positions int64[width] of the next pass, and its attention blocks."""
        assert self._columns is not None
        tokens = self._columns.tokens
        positions = self._columns.positions + self._columns.shifts
        blocks: list[Block] = list(self._blocks)
        if padding := self.width - len(self.lanes):
            tokens, positions = pad(tokens, (0, padding)), pad(positions, (0, padding))
            blocks.append(PaddingBlock(padding))
        return tokens, positions, blocks

    def note_experts(self, experts: torch.Tensor) -> None:
        """Notes where this pass sent its tokens, int16[at least the lanes, layers, chosen]."""
        assert self._columns is not None
        columns = self._columns
        self._outputs.write_experts(columns.slots, columns.counts - 1, experts[: len(self)])

    def advance(self, logits: torch.Tensor) -> bool:
        """Draws the next tokens from `logits` [width, V].

        True when a lane ended or outgrew its row: `settle` must run before the next pass.
        """
        assert self._columns is not None
        columns, full = self._columns, False
        positions = columns.positions + 1
        forbidden = columns.forbidden() if self._holding else None
        drawn = self._draw(logits[: len(self)], columns.settings, positions, self.lanes, forbidden)
        self._outputs.write(columns.slots, columns.counts, drawn)
        columns.advance(drawn.tokens)
        for block in self._blocks:
            block.advance()
            full |= block.length > block.capacity
        self._steps_left -= 1
        has_stop = self._searching and self._search(self.lanes, drawn.tokens)
        return full or has_stop or self._steps_left == 0 or bool(columns.stopped().any())

    def start(self, groups: Sequence[tuple[Request, list[Lane]]]) -> None:
        """Draws the first tokens of samples whose prompt is ready; `settle` must follow."""
        requests = [request for request, _ in groups]
        lanes = [lane for _, members in groups for lane in members]
        counts = [len(members) for _, members in groups]
        repeats = torch.tensor(counts, device=self._device)
        seeds = [lane.request.seeds[lane.index] for lane in lanes]
        samplings = [request.sampling for request in requests]
        settings = DrawSettings.of(samplings, counts, seeds, self._device)
        logits = torch.stack([r.prompt.logits for r in requests if r.prompt.logits is not None])
        lengths = torch.tensor([request.prompt.length for request in requests])
        positions = lengths.to(self._device).repeat_interleave(repeats)
        held = [request.stops if request.sampling.min_new_tokens else () for request in requests]
        forbidden = None
        if any(held):
            filled = torch.tensor(_filled(held), device=self._device)
            forbidden = filled.repeat_interleave(repeats, 0)
        drawn = self._draw(
            logits.repeat_interleave(repeats, 0), settings, positions, lanes, forbidden
        )
        slots = self._outputs.reserve(len(lanes), max(request.budget for request in requests))
        now = time.monotonic()
        for lane, slot in zip(lanes, slots, strict=True):
            lane.slot, lane.began = slot, now
            lane.mark(0, lane.request.prompt.served)
            lane.prompt_experts = lane.request.prompt.experts
        fresh = Columns.of(requests, repeats, drawn.tokens, slots, settings)
        self._outputs.write(fresh.slots, fresh.counts - 1, drawn)
        self._columns = fresh if self._columns is None else self._columns.joined(fresh)
        first = len(self.lanes)
        self.lanes += lanes
        self._search(lanes, drawn.tokens)
        for request, members in groups:
            assert request.prompt.kv is not None
            self._rows.place(request.prompt.kv, range(first, first + len(members)))
            first += len(members)

    def settle(self) -> Deltas:
        """Takes out lanes that ended and gets ready for the next pass."""
        if self._columns is None:
            return []
        stopped = self._columns.stopped()
        for row, lane in enumerate(self.lanes):
            if lane.has_stop:
                stopped[row] = True
        rows = (stopped | (self._columns.counts >= self._columns.budgets)).nonzero()[:, 0]
        reasons = [
            FinishReason.STOP if stop else FinishReason.LENGTH for stop in stopped[rows].tolist()
        ]
        return self._remove(rows.tolist(), reasons)

    def abort(self, lanes: Collection[Lane]) -> Deltas:
        """Takes out some lanes with what they have."""
        rows = [row for row, lane in enumerate(self.lanes) if lane in lanes]
        return self._remove(rows, [FinishReason.ABORTED] * len(rows))

    def stream(self) -> Deltas:
        """Returns what streaming lanes drew and did not hand out yet."""
        streams = [row for row, lane in enumerate(self.lanes) if lane.request.generation.stream]
        return self._read(streams, [None] * len(streams))

    def mark(self) -> None:
        """Notes that tokens drawn from now on come from the weights that prompts have now."""
        if self._columns is not None:
            for lane, count in zip(self.lanes, self._columns.counts.tolist(), strict=True):
                if lane.versions[-1][1] != lane.request.prompt.served:
                    lane.mark(count, lane.request.prompt.served)

    def take_broken(self) -> set[int]:
        """Return keys of requests whose logits were not finite, once: what they drew is nothing."""
        broken, self._broken = self._broken, set()
        return broken

    def _search(self, lanes: Sequence[Lane], tokens: torch.Tensor) -> bool:
        """Looks for stop strings, which end with these tokens; true where one does."""
        searched = [(row, lane) for row, lane in enumerate(lanes) if lane.request.searches]
        if not searched:
            return False
        drawn = tokens.tolist()
        for row, lane in searched:
            lane.searched += 1
            found = lane.request.searches[lane.index].add(drawn[row])
            lane.has_stop = found and lane.searched >= lane.request.sampling.min_new_tokens
        return any(lane.has_stop for _, lane in searched)

    def _draw(
        self,
        logits: torch.Tensor,
        settings: DrawSettings,
        positions: torch.Tensor,
        lanes: Sequence[Lane],
        forbidden: torch.Tensor | None,
    ) -> Drawn:
        if self._fixed_rows:
            drawn = draw_fixed(logits, settings, positions, self._fixed_rows, forbidden)
        else:
            drawn = draw(logits, settings, positions, forbidden)
        if drawn.broken is not None:
            rows = drawn.broken.nonzero()[:, 0].tolist()
            self._broken |= {lanes[row].request.key for row in rows}
        return drawn

    def _read(self, rows: list[int], reasons: Sequence[FinishReason | None]) -> Deltas:
        if self._columns is None or not rows:
            return []
        lanes, counts = [self.lanes[row] for row in rows], self._columns.counts.tolist()
        written = self._outputs.read(
            [lane.slot for lane in lanes],
            [(lane.sent, counts[row]) for row, lane in zip(rows, lanes, strict=True)],
            [lane.tempered for lane in lanes],
        )
        return [
            (lane, lane.delta(tokens, reason))
            for lane, tokens, reason in zip(lanes, written, reasons, strict=True)
        ]

    def _remove(self, rows: list[int], reasons: Sequence[FinishReason]) -> Deltas:
        deltas = self._read(rows, reasons)
        self._outputs.release([lane.slot for lane, _ in deltas])
        self._rows.free(set(rows))
        self._form()
        return deltas

    def _form(self) -> None:
        """Brings rows, columns and lanes into one order and sets up the next pass."""
        if self._columns is None:
            return
        self._rows.promote(self._columns.positions.tolist())
        order = self._rows.order()
        if order != list(range(len(self.lanes))):
            self.lanes = [self.lanes[index] for index in order]
            rows = torch.tensor(order, dtype=torch.int64, device=self._device)
            self._columns = self._columns.select(rows) if order else None
        self._blocks = []
        requests = {lane.request for lane in self.lanes}
        self.streaming = any(request.generation.stream for request in requests)
        self._searching = any(request.searches for request in requests)
        self._holding = any(request.sampling.min_new_tokens for request in requests)
        if self._columns is not None:
            places = self._columns.positions.tolist()
            self._blocks = self._rows.blocks(places, whole_rows=self._fixed_rows > 0)
            self._steps_left = int((self._columns.budgets - self._columns.counts).min())
