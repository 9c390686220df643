"""AdamW whose state waits on the host: block by block it comes to the device and leaves again.

Megatron's own offloading (HybridDeviceOptimizer) steps on the processors of the host instead. Here
steps are the device's, bit for bit those of state that never left, and the host only holds it:
12 bytes cross in either direction for each parameter of 16 bits, 8 for one of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.optim.adamw import adamw

from sluice import platform

BLOCK_BYTES = 128 << 20  # of state; a power of two, as pinned memory is handed out
BUFFERS = 3  # of the device: one is filled while another is stepped and a third is emptied
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, begin + count) of what an optimizer updates: `owner`, flat.

    Their state are columns [at, at + count) of the block that they are in.
    """

    owner: torch.Tensor
    group: dict[str, Any]  # of settings, read at every step
    begin: int
    count: int
    at: int

    @property
    def weights(self) -> torch.Tensor:
        return self.owner.detach().view(-1)[self.begin : self.begin + self.count]

    @property
    def gradient(self) -> torch.Tensor:
        """Where Megatron leaves it: in float32, of whatever type the weights are."""
        whole: torch.Tensor = self.owner.decoupled_grad  # type: ignore[attr-defined]
        return whole.view(-1)[self.begin : self.begin + self.count]


@dataclass(frozen=True)
class Block:
    """What moves at once. `state` is float32[2 or 3, elements]: both moments, then weights.

    Weights that are float32 themselves have no row.
    """

    stretches: tuple[Stretch, ...]
    state: torch.Tensor
    on_host: bool


@dataclass(frozen=True)
class KeptStretch:
    """A stretch with its weights and moments in float32, flat, where they lie between steps."""

    owner: torch.Tensor
    begin: int
    main: torch.Tensor
    moments: dict[str, torch.Tensor]


class OffloadedAdamW:
    """Steps what Megatron's DistributedOptimizer gives it to update, weights of any type.

    Stands in for Megatron's HybridDeviceOptimizer, which keeps float32 weights itself and reads
    `decoupled_grad`. Made twice, the second time with this rank's share: `start` begins the state.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], *, offload_fraction: float, **defaults: Any
    ) -> None:
        """params: groups; defaults: `lr`, `betas`, `eps` and `weight_decay` of those that say none.

        offload_fraction: of all elements, whose state waits on the host.
        """
        self.defaults = {"offload_fraction": offload_fraction, **defaults}
        self.param_groups = list(params)
        for group in self.param_groups:
            for name in ("lr", "betas", "eps", "weight_decay"):
                group.setdefault(name, defaults[name])
        self.steps = 0
        self._fraction = offload_fraction
        self._blocks: list[Block] = []

    def start(self) -> None:
        """Begin the state: zeros, and weights in float32."""
        waiting = round(self._fraction * sum(p.numel() for _, p in self._updated()))
        narrow = [(g, p) for g, p in self._updated() if p.dtype != torch.float32]
        wide = [(g, p) for g, p in self._updated() if p.dtype == torch.float32]
        for updated, rows in ((narrow, len(MOMENTS) + 1), (wide, len(MOMENTS))):
            most = BLOCK_BYTES // (rows * torch.float32.itemsize)
            for stretches in _blocks_of(updated, most, waiting):
                count = sum(stretch.count for stretch in stretches)
                self._blocks.append(_begun(stretches, (rows, count), on_host=waiting > 0))
                waiting -= count if waiting > 0 else 0

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients. Blocks are where they were when it returns."""
        self.steps += 1
        for block, state in _on_device(self._blocks):
            for _, stretches in groupby(block.stretches, key=lambda s: id(s.group)):
                _update(list(stretches), state, self.steps)

    def kept(self) -> Iterator[KeptStretch]:
        """Yield all that is kept between steps."""
        for block in self._blocks:
            for stretch in block.stretches:
                own = block.state[:, stretch.at : stretch.at + stretch.count]
                main = own[len(MOMENTS)] if len(own) > len(MOMENTS) else stretch.weights
                moments = dict(zip(MOMENTS, own, strict=False))
                yield KeptStretch(stretch.owner, stretch.begin, main, moments)

    def on_device(self) -> list[torch.Tensor]:
        """List the state that does not wait on the host."""
        return [block.state for block in self._blocks if not block.on_host]

    def _updated(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter


def _blocks_of(
    updated: Iterable[tuple[dict[str, Any], torch.Tensor]], most: int, waiting: int
) -> Iterator[list[Stretch]]:
    """Cut parameters into blocks of `most` elements at most, and where `waiting` of them end."""
    block: list[Stretch] = []
    room = limit = min(most, waiting) if waiting > 0 else most
    for group, parameter in updated:
        begin = 0
        while begin < parameter.numel():
            count = min(room, parameter.numel() - begin)
            block.append(Stretch(parameter, group, begin, count, limit - room))
            begin, room = begin + count, room - count
            if not room:
                yield block
                block, waiting = [], waiting - limit
                room = limit = min(most, waiting) if waiting > 0 else most
    if block:
        yield block


def _begun(stretches: list[Stretch], shape: tuple[int, int], *, on_host: bool) -> Block:
    if on_host:
        size = shape[0] * shape[1] * torch.float32.itemsize
        state = platform.current().host_memory(size).view(torch.float32).view(shape)
    else:
        state = torch.empty(shape, dtype=torch.float32, device=stretches[0].owner.device)
    state[: len(MOMENTS)].zero_()
    for stretch in stretches:
        for main in state[len(MOMENTS) :, stretch.at : stretch.at + stretch.count]:
            main.copy_(stretch.weights)
    return Block(tuple(stretches), state, on_host)


def _update(stretches: list[Stretch], state: torch.Tensor, steps: int) -> None:
    """Take step number `steps` of stretches of one group, with the state of a whole block."""
    group = stretches[0].group
    own = [state[:, stretch.at : stretch.at + stretch.count] for stretch in stretches]
    mains = [
        rows[len(MOMENTS)] if len(rows) > len(MOMENTS) else stretch.weights
        for rows, stretch in zip(own, stretches, strict=True)
    ]
    adamw(
        mains,
        [stretch.gradient for stretch in stretches],
        [rows[0] for rows in own],
        [rows[1] for rows in own],
        [],
        [torch.tensor(float(steps - 1)) for _ in stretches],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if len(state) > len(MOMENTS):
        for main, stretch in zip(mains, stretches, strict=True):
            stretch.weights.copy_(main)


class _Buffer:
    """Memory of the device in which the states of blocks take turns."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.float32, device=device)
        self.state = self._memory  # of the block whose turn it is
        self._copied: Any = None  # an event

    def bring(self, block: Block) -> None:
        """Begin to fill it, once its last block has left; `settle` waits for the end."""
        self.settle()
        self.state = self._memory[: block.state.numel()].view_as(block.state)
        self._copied = _begin_copy(self.state, block.state)

    def leave(self, block: Block) -> None:
        """Begin to empty it, behind what the device has been given to do."""
        self._copied = _begin_copy(block.state, self.state)

    def settle(self) -> None:
        """Have the host wait for the last copy."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _begin_copy(into: torch.Tensor, source: torch.Tensor) -> Any:
    stream = platform.current().side_stream()
    if stream is None:
        into.copy_(source)
        return None
    return platform.current().begin_copy(into, source, stream)


def _on_device(blocks: Iterable[Block]) -> Iterator[tuple[Block, torch.Tensor]]:
    """Yield blocks with their states on the device, to be changed before the next is taken."""
    yield from ((block, block.state) for block in blocks if not block.on_host)
    waiting = [block for block in blocks if block.on_host]
    if not waiting:
        return
    device = waiting[0].stretches[0].owner.device
    size = max(block.state.numel() for block in waiting)
    buffers = [_Buffer(size, device) for _ in waiting[:BUFFERS]]
    turns = [buffers[number % BUFFERS] for number in range(len(waiting))]
    turns[0].bring(waiting[0])
    for number, (buffer, block) in enumerate(zip(turns, waiting, strict=True), 1):
        if number < len(waiting):
            turns[number].bring(waiting[number])
        buffer.settle()
        yield block, buffer.state
        buffer.leave(block)
    for buffer in buffers:
        buffer.settle()
