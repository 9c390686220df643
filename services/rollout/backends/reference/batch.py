"""The decoding samples as tensors in packed order, and their rows in the cache.

Between changes of who runs, a step touches no Python object per sample: draws pile up as
tensors and reach the lanes in `flush`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from services.rollout.backends.reference.attention import Block, DecodeBlock, PaddingBlock
from services.rollout.backends.reference.drawing import Drawn, DrawSettings, draw
from services.rollout.backends.reference.kv_cache import CacheShape, RowStore, capacity_for
from services.rollout.backends.reference.lanes import Lane, Prompt
from services.rollout.engine import Sampling

PADDING = Sampling(max_new_tokens=1)


class DecodeBatch:
    """Lanes in packed order: by row size, then by row.

    With `fixed_rows` every pass has that many rows and every sample attends to its whole row,
    so that shapes, and with them rounding, do not depend on who else runs.
    """

    def __init__(self, shape: CacheShape, max_length: int, fixed_rows: int = 0) -> None:
        self.lanes: list[Lane] = []
        self.streaming = False  # some lane wants its tokens as they come
        self._shape, self._max_length, self._fixed_rows = shape, max_length, fixed_rows
        self._stores: dict[int, RowStore] = {}
        self._rows: dict[int, list[Lane]] = {}  # by capacity; the index is the row
        self._history: list[Drawn] = []
        self._blocks: list[DecodeBlock] = []
        self._tokens = self._positions = torch.empty(0, dtype=torch.int64)
        self._settings = DrawSettings.of([], [], shape.device)
        self._stops: torch.Tensor | None = None
        self._version = (0, "")
        self._steps_left = 0  # until the first lane has used up its budget

    def __len__(self) -> int:
        return len(self.lanes)

    @property
    def width(self) -> int:
        """Rows of a pass."""
        return (self._fixed_rows or len(self.lanes)) if self.lanes else 0

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, list[Block]]:
        """Tokens and positions int64[width] of the next pass, and its attention blocks."""
        blocks: list[Block] = list(self._blocks)
        if padding := self.width - len(self.lanes):
            blocks.append(PaddingBlock(padding))
        return self._tokens, self._positions, blocks

    def advance(self, logits: torch.Tensor, version: tuple[int, str]) -> bool:
        """Draw the next tokens from `logits` [width, V].

        True when a lane ended or outgrew its row: `settle` must run before the next pass.
        """
        self._version = version
        self._positions += 1
        drawn = draw(logits, self._settings, self._positions)
        self._history.append(drawn)
        self._tokens = drawn.tokens
        self._steps_left -= 1
        full = False
        for block in self._blocks:
            block.advance()
            full |= block.length > block.capacity
        stopped = False
        if self._stops is not None:
            live = self._tokens[: len(self.lanes), None]
            stopped = bool((live == self._stops).any())
        return stopped or full or self._steps_left == 0

    def flush(self) -> None:
        """Move draws from tensors to the lanes."""
        if not self._history:
            return
        history, self._history = self._history, []
        tokens = torch.stack([drawn.tokens for drawn in history], 1).tolist()
        logprobs = torch.stack([drawn.logprobs for drawn in history], 1).tolist()
        plain = logprobs
        if any(drawn.logprobs_t1 is not drawn.logprobs for drawn in history):
            plain = torch.stack([drawn.logprobs_t1 for drawn in history], 1).tolist()
        for row, lane in enumerate(self.lanes):
            lane.append(tokens[row], logprobs[row], plain[row], self._version)

    def place(self, started: Sequence[tuple[Prompt, Sequence[Lane]]]) -> None:
        """Give rows to lanes that have their first token; `rebuild` must follow."""
        for prompt, lanes in started:
            assert prompt.kv is not None
            store, rows = self._store(prompt.length + 1)
            store.extend(prompt.kv, len(lanes))
            rows.extend(lanes)

    def remove(self, gone: Collection[Lane]) -> None:
        """Free the rows of lanes; flush before, `rebuild` after."""
        for capacity, lanes in self._rows.items():
            kept = [row for row, lane in enumerate(lanes) if lane not in gone]
            if len(kept) < len(lanes):
                self._keep(capacity, kept)

    def rebuild(self) -> None:
        """Move outgrown lanes to larger rows and set the tensors up for the next pass."""
        assert not self._history
        for capacity in sorted(self._rows):
            self._promote(capacity)
        used = sorted(capacity for capacity, lanes in self._rows.items() if lanes)
        self.lanes = [lane for capacity in used for lane in self._rows[capacity]]
        self.streaming = any(lane.request.generation.stream for lane in self.lanes)
        if not self.lanes:
            self._blocks = []
            return
        device, padding = self._shape.device, self.width - len(self.lanes)
        places = [lane.position for lane in self.lanes]
        last = [lane.token_ids[-1] for lane in self.lanes]
        self._positions = torch.tensor(places + [0] * padding, device=device)
        self._tokens = torch.tensor(last + [0] * padding, device=device)
        self._settings = DrawSettings.of(
            [lane.request.sampling for lane in self.lanes] + [PADDING] * padding,
            [lane.request.seeds[lane.index] for lane in self.lanes] + [0] * padding,
            device,
        )
        self._stops = self._stop_table()
        self._steps_left = min(lane.request.budget - len(lane.token_ids) for lane in self.lanes)
        self._blocks, first = [], 0
        for capacity in used:
            count = len(self._rows[capacity])
            self._blocks.append(self._block(capacity, places[first : first + count]))
            first += count

    def _block(self, capacity: int, places: list[int]) -> DecodeBlock:
        fixed = self._fixed_rows > 0
        positions = torch.tensor(places, device=self._shape.device)
        heads = torch.arange(len(places) * self._shape.kv_heads, device=self._shape.device)
        each = positions.repeat_interleave(self._shape.kv_heads)
        return DecodeBlock(
            kv=self._stores[capacity].kv,
            slots=heads * capacity + each,
            positions=positions,
            length=max(places) + 1,
            attended=capacity if fixed else 0,
            uniform=not fixed and min(places) == max(places),
        )

    def _stop_table(self) -> torch.Tensor | None:
        """int64[1 or lanes, widest set of stop tokens], filled up with -1."""
        sets = [lane.request.stops for lane in self.lanes]
        if all(stops is sets[0] or stops == sets[0] for stops in sets):
            sets = sets[:1]
        widest = max(map(len, sets))
        if not widest:
            return None
        rows = [[*stops, *[-1] * (widest - len(stops))] for stops in sets]
        return torch.tensor(rows, device=self._shape.device)

    def _promote(self, capacity: int) -> None:
        lanes = self._rows[capacity]
        outgrown = [row for row, lane in enumerate(lanes) if lane.position >= capacity]
        if not outgrown:
            return
        store, rows = self._store(capacity + 1)
        store.adopt(self._stores[capacity], outgrown)
        rows.extend(lanes[row] for row in outgrown)
        leaving = set(outgrown)
        self._keep(capacity, [row for row in range(len(lanes)) if row not in leaving])

    def _keep(self, capacity: int, rows: list[int]) -> None:
        lanes = self._rows[capacity]
        self._rows[capacity] = [lanes[row] for row in self._stores[capacity].keep(rows)]

    def _store(self, length: int) -> tuple[RowStore, list[Lane]]:
        capacity = capacity_for(length, self._max_length)
        if capacity not in self._stores:
            self._stores[capacity] = RowStore(self._shape, capacity)
            self._rows[capacity] = []
        return self._stores[capacity], self._rows[capacity]
