"""Where every token of packed samples lives under context parallelism: positions only, no tensors.

Samples are laid end to end into a pack, with padding where a layout needs it, and the pack is cut
over the ranks. What belongs to a token (log-probs, masks, advantages, a terminal reward) finds
its rank by the token's position in its sample, never by being first or last in a local slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

LayoutKind = Literal["none", "zigzag", "contiguous"]


@dataclass(frozen=True)
class ContextSlice:
    """Consecutive tokens of one sequence that stand side by side on a rank.

    Places first..stop of the pack (end exclusive), of the sequence that starts at `start`.
    sample: its index, or -1 for the padding behind the last one.
    """

    sample: int
    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class KeyRange:
    """A rank's slots start..stop see keys first..last of the whole pack (ends exclusive).

    The mask is causal from the lower right: the last of them sees the last key.
    """

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """Samples of `lengths` tokens over `size` ranks, which all hold `local_length` slots.

    none: one rank. zigzag: every sample is padded to 2 x size equal chunks and rank r holds
    chunks r and 2 size - 1 - r, so that causal attention costs all ranks the same. contiguous:
    the pack is cut into `size` equal stretches, whatever sample they fall into (all-gather and
    sparse attention). multiple: slots of a rank divide by it (sequence parallelism).
    """

    kind: LayoutKind
    lengths: tuple[int, ...]
    size: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.multiple < 1:
            raise ValueError(f"size {self.size} and multiple {self.multiple} must be positive")
        if self.kind == "none" and self.size != 1:
            raise ValueError(f"layout none has one rank, not {self.size}")
        if any(length < 0 for length in self.lengths):
            raise ValueError("a sample has a negative length")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First place of each sample in the pack, and the place behind the last one."""
        each = 2 * self.size if self.kind == "zigzag" else 1
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + -(-length // each) * each)
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        """Places in the pack, padding included; at least `multiple` a rank."""
        each = 2 * self.size if self.kind == "zigzag" else 1
        whole = math.lcm(each, self.size * self.multiple)
        return max(-(-self.starts[-1] // whole), 1) * whole

    @property
    def all_starts(self) -> tuple[int, ...]:
        """As `starts`, with the padding behind the last sample as one more."""
        return self.starts if self.starts[-1] == self.total else (*self.starts, self.total)

    @property
    def local_length(self) -> int:
        """Slots of every rank."""
        return self.total // self.size

    def pieces(self, rank: int) -> list[ContextSlice]:
        """Returns what `rank` holds, in the order of its slots; padding included."""
        spans = list(zip(range(len(self.lengths)), self.starts, self.starts[1:], strict=False))
        spans.append((-1, self.starts[-1], self.total))
        if self.kind != "zigzag":
            low, high = rank * self.local_length, (rank + 1) * self.local_length
            cut = [ContextSlice(i, a, max(a, low), min(b, high)) for i, a, b in spans]
            return [piece for piece in cut if piece.first < piece.stop]
        pieces = []
        for sample, start, stop in spans:
            chunk = (stop - start) // (2 * self.size)
            for index in (rank, 2 * self.size - 1 - rank):
                first = start + index * chunk
                pieces.append(ContextSlice(sample, start, first, first + chunk))
        return [piece for piece in pieces if piece.first < piece.stop]

    def runs(self, rank: int) -> tuple[KeyRange, ...]:
        """Returns what the slots of `rank` attend to: each piece its sequence up to its own end."""
        runs: list[KeyRange] = []
        end = 0
        for piece in self.pieces(rank):
            runs.append(KeyRange(end, end + piece.stop - piece.first, piece.start, piece.stop))
            end = runs[-1].stop
        return tuple(runs)

    @cached_property
    def pack_of_place(self) -> torch.Tensor:
        """int64[total]: for the slots of rank 0, then of rank 1 ..., their places in the pack."""
        parts = [
            torch.arange(piece.first, piece.stop)
            for rank in range(self.size)
            for piece in self.pieces(rank)
        ]
        return torch.cat(parts)

    @cached_property
    def place_of_pack(self) -> torch.Tensor:
        """int64[total]: rank x local_length + slot of each place in the pack."""
        inverse = torch.empty_like(self.pack_of_place)
        inverse[self.pack_of_place] = torch.arange(self.total)
        return inverse

    @cached_property
    def token_places(self) -> torch.Tensor:
        """int64[sum of lengths]: rank x local_length + slot of every token, sample by sample."""
        parts = [torch.empty(0, dtype=torch.int64)]
        parts += [torch.arange(a, a + n) for a, n in zip(self.starts, self.lengths, strict=False)]
        return self.place_of_pack[torch.cat(parts)]

    def split(self, samples: Sequence[torch.Tensor], rank: int, fill: float = 0) -> torch.Tensor:
        """Returns [local_length, ...], the slots of `rank`, of per-sample [length_i, ...]."""
        lengths = tuple(len(values) for values in samples)
        if lengths != self.lengths:
            raise ValueError(f"tensors of lengths {lengths} for samples of {self.lengths}")
        if not samples:
            raise ValueError("no sample to split: dtype and device are unknown")
        pack = samples[0].new_full((self.total, *samples[0].shape[1:]), fill)
        for start, values in zip(self.starts, samples, strict=False):
            pack[start : start + len(values)] = values
        slots = slice(rank * self.local_length, (rank + 1) * self.local_length)
        return pack[self.pack_of_place[slots].to(pack.device)]

    def assemble(self, places: torch.Tensor) -> list[torch.Tensor]:
        """Returns per-sample tensors from [total, ...], the slots of all ranks in rank order."""
        tokens = places.index_select(0, self.token_places.to(places.device))
        return list(tokens.split(list(self.lengths)))

    def responses(self, prompt_lengths: Sequence[int]) -> ResponseLayout:
        """Returns where the response tokens are predicted, given each sample's prompt."""
        return ResponseLayout(layout=self, prompt_lengths=tuple(prompt_lengths))


@dataclass(frozen=True, kw_only=True)
class ResponseLayout:
    """Response tokens of the samples: token p is predicted at position p - 1, by its owner.

    "Packed" below is the order of all R response tokens, sample by sample, as `pack_rows` has
    them. A rank may predict none of them.
    """

    layout: SequenceLayout
    prompt_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = self.layout.lengths
        if len(lengths) != len(self.prompt_lengths):
            raise ValueError(f"{len(self.prompt_lengths)} prompts for {len(lengths)} samples")
        for i, (prompt, length) in enumerate(zip(self.prompt_lengths, lengths, strict=True)):
            if not 1 <= prompt <= length:
                raise ValueError(f"sample {i} has a prompt of {prompt} in {length} tokens")

    @cached_property
    def places(self) -> torch.Tensor:
        """int64[R]: rank x local_length + slot of each response token's predictor, packed order."""
        parts = [torch.empty(0, dtype=torch.int64)]
        for start, prompt, length in zip(
            self.layout.starts, self.prompt_lengths, self.layout.lengths, strict=False
        ):
            parts.append(torch.arange(start + prompt - 1, start + length - 1))
        return self.layout.place_of_pack[torch.cat(parts)]

    def share(self, rank: int) -> torch.Tensor:
        """Returns int64[L]: which response tokens `rank` predicts, in packed (and slot) order."""
        return (self.places // self.layout.local_length == rank).nonzero()[:, 0]

    def slots(self, rank: int) -> torch.Tensor:
        """Returns int64[L]: the slots of `rank` that predict them, ascending."""
        return self.places[self.share(rank)] - rank * self.layout.local_length
