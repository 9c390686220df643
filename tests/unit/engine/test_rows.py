"""The cache's rows against a plain dictionary of sequences."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine.reference.attention import CacheRows, CacheShape, capacity_for

SHAPE = CacheShape(
    layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
)
LIMIT = 100


class Sequences:
    """What each lane's row must hold: [layers, 2, kv_heads, length, head_dim]."""

    def __init__(self) -> None:
        self.rows = CacheRows(SHAPE, LIMIT)
        self.lanes: list[torch.Tensor] = []

    def start(self, length: int, copies: int) -> None:
        prompt = torch.randn(2, 2, 3, length, 4)
        first = len(self.lanes)
        self.rows.place(prompt, range(first, first + copies))
        self.lanes += [prompt] * copies
        self.form()

    def free(self, gone: set[int]) -> None:
        self.rows.free(gone)
        self.form()

    def form(self) -> None:
        self.rows.promote([lane.shape[3] if lane is not None else 0 for lane in self.lanes])
        self.lanes = [self.lanes[index] for index in self.rows.order()]

    def decode(self) -> None:
        """One more token for all, as attention writes it."""
        places = [lane.shape[3] for lane in self.lanes]
        first = 0
        for block in self.rows.blocks(places, whole_rows=False):
            new = torch.randn(2, 2, block.count, 3, 4)
            for layer in range(2):
                for part in range(2):
                    flat = block.kv[layer, part].view(-1, 4)
                    flat.index_copy_(0, block.slots, new[layer, part].reshape(-1, 4))
            for row in range(block.count):
                lane = self.lanes[first + row]
                self.lanes[first + row] = torch.cat([lane, new[:, :, row, :, None]], 3)
            first += block.count
        self.form()

    def check(self) -> None:
        places = [lane.shape[3] for lane in self.lanes]
        blocks = self.rows.blocks(places, whole_rows=False)
        assert sum(block.count for block in blocks) == len(self.lanes)
        first = 0
        for block in blocks:
            for row in range(block.count):
                lane = self.lanes[first + row]
                length = lane.shape[3]
                assert torch.equal(block.kv[:, :, row, :, :length], lane)
                assert block.positions[row] == length < block.capacity
                # What a lane pays for is bounded by its own length.
                assert block.length <= max(2 * (length + 1), 16)
            first += block.count


@settings(max_examples=40)
@given(data=st.data())
def test_rows_hold_their_sequences_through_growth_moves_and_ends(data: st.DataObject) -> None:
    state = Sequences()
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["start", "decode", "free"]))
        if action == "start":
            state.start(data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4)))
        elif action == "decode":
            for _ in range(data.draw(st.integers(1, 5))):
                if max((lane.shape[3] for lane in state.lanes), default=0) < LIMIT - 1:
                    state.decode()
        elif state.lanes:
            state.free(data.draw(st.sets(st.integers(0, len(state.lanes) - 1))))
        state.check()


def test_capacities_are_powers_of_two_cut_to_the_limit() -> None:
    assert [capacity_for(n, 100) for n in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]
    assert capacity_for(3, 10) == 10
