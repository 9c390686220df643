"""Positions under context parallelism, against the definition of each layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algo.layout import SequenceLayout
from sluice.algo.packed_rows import generalized_advantages, place_terminal

SIZES = [1, 2, 3, 4, 8]
lengths = st.lists(st.integers(0, 40), max_size=6).map(tuple)
kinds = st.sampled_from(["zigzag", "contiguous"])


def owner(layout, sample, position):
    """(rank, slot) of one token."""
    place = int(layout.place_of_pack[layout.starts[sample] + position])
    return divmod(place, layout.local_length)


def share(columns, responses, rank):
    """What `rank` predicts of per-sample columns."""
    return torch.cat(columns)[responses.share(rank)]


def slots_by_definition(kind, lengths, size, multiple):
    """Per rank the (sample, position) of every slot, None for padding, written out slowly."""
    each = 2 * size if kind == "zigzag" else 1
    pack = []
    for sample, length in enumerate(lengths):
        pack.append([(sample, p) for p in range(length)] + [None] * (-length % each))
    whole = math.lcm(each, size * multiple)
    filled = sum(map(len, pack))
    pack.append([None] * (max(math.ceil(filled / whole), 1) * whole - filled))
    if kind == "contiguous":
        flat = [slot for sequence in pack for slot in sequence]
        share = len(flat) // size
        return [flat[r * share : (r + 1) * share] for r in range(size)]
    ranks = [[] for _ in range(size)]
    for sequence in pack:
        chunk = len(sequence) // (2 * size)
        for r in range(size):
            for c in (r, 2 * size - 1 - r):
                ranks[r] += sequence[c * chunk : (c + 1) * chunk]
    return ranks


@settings(max_examples=50)
@given(kinds, lengths, st.sampled_from(SIZES), st.sampled_from([1, 2, 3]))
def test_every_token_has_its_place_by_definition(kind, lengths, size, multiple):
    layout = SequenceLayout(kind=kind, lengths=lengths, size=size, multiple=multiple)
    expected = slots_by_definition(kind, lengths, size, multiple)
    names = [torch.tensor([100 * i + p for p in range(n)]).long() for i, n in enumerate(lengths)]
    assert layout.local_length % multiple == 0
    for rank, slots in enumerate(expected):
        assert len(slots) == layout.local_length
        for slot, token in enumerate(slots):
            if token is not None:
                assert owner(layout, *token) == (rank, slot)
        if lengths:
            held = [-1 if token is None else 100 * token[0] + token[1] for token in slots]
            assert layout.split(names, rank, fill=-1).tolist() == held
    if lengths:
        places = torch.cat([layout.split(names, rank) for rank in range(size)])
        assert [s.tolist() for s in layout.assemble(places)] == [s.tolist() for s in names]


@settings(max_examples=50)
@given(kinds, lengths, st.sampled_from(SIZES))
def test_pieces_are_runs_of_one_sequence(kind, lengths, size):
    layout = SequenceLayout(kind=kind, lengths=lengths, size=size)
    for rank in range(size):
        pieces = layout.pieces(rank)
        slots = slice(rank * layout.local_length, (rank + 1) * layout.local_length)
        told = [place for piece in pieces for place in range(piece.first, piece.stop)]
        assert told == layout.pack_of_place[slots].tolist()
        for piece in pieces:
            start = layout.starts[piece.sample]  # sample -1: the padding behind all
            assert piece.start == start <= piece.first < piece.stop


def draw_responses(seed, size):
    """Samples from one token on: most are shorter than 2 x size."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 6, (1,), generator=generator))
    lengths = torch.randint(1, 3 * size + 2, (count,), generator=generator).tolist()
    prompts = [int(torch.randint(1, n + 1, (1,), generator=generator)) for n in lengths]
    return tuple(lengths), prompts, generator


@settings(max_examples=50)
@given(kinds, st.integers(0, 2**31), st.sampled_from(SIZES))
def test_shares_are_a_partition_of_the_response_tokens(kind, seed, size):
    lengths, prompts, _ = draw_responses(seed, size)
    layout = SequenceLayout(kind=kind, lengths=lengths, size=size)
    responses = layout.responses(prompts)
    names = [
        torch.arange(n - p) + 100 * i for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))
    ]
    seen = []
    for rank in range(size):
        slots = responses.slots(rank)
        assert (slots.diff() > 0).all()
        for name, slot in zip(share(names, responses, rank).tolist(), slots.tolist(), strict=True):
            sample, index = divmod(name, 100)  # a token is predicted one before it
            assert owner(layout, sample, prompts[sample] + index - 1) == (rank, slot)
        seen += responses.share(rank).tolist()
    assert sorted(seen) == list(range(sum(len(n) for n in names)))


def gae_over_ranks(kind, size, lengths, prompts, rewards, values, masks):
    """Each rank holds its share of the values; all are put together by global position."""
    layout = SequenceLayout(kind=kind, lengths=lengths, size=size)
    responses = layout.responses(prompts)
    places = torch.zeros(layout.total, dtype=torch.float64)
    for rank in range(size):
        slots = responses.slots(rank) + rank * layout.local_length
        places[slots] = share(values, responses, rank)
    whole = places[responses.places].split([len(v) for v in values])
    columns = [
        generalized_advantages(
            place_terminal(mask, reward), value, mask, gamma=0.9, gae_lambda=0.8
        )[0]
        for value, mask, reward in zip(whole, masks, rewards, strict=True)
    ]
    found = torch.zeros(sum(map(len, values)), dtype=torch.float64)
    for rank in range(size):
        found[responses.share(rank)] = share(columns, responses, rank)
    return found


@settings(max_examples=50)
@given(kinds, st.integers(0, 2**31), st.sampled_from([2, 4, 8]))
def test_gae_and_its_terminal_reward_do_not_depend_on_the_context_size(kind, seed, size):
    """Also for samples shorter than the context size, where most ranks hold none of a sample."""
    lengths, prompts, generator = draw_responses(seed, size)
    shapes = [n - p for n, p in zip(lengths, prompts, strict=True)]
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in shapes]
    masks = [torch.rand(n, generator=generator) > 0.3 for n in shapes]
    rewards = torch.randn(len(shapes), generator=generator).tolist()
    case = (lengths, prompts, rewards, values, masks)
    assert torch.equal(gae_over_ranks(kind, size, *case), gae_over_ranks("none", 1, *case))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_last_local_token_of_rank_0_is_not_always_the_last_of_the_sample(size):
    """Negative control: that shortcut credits another token, or none, for short samples."""
    missed = 0
    for length in range(2, 64):
        responses = SequenceLayout(kind="zigzag", lengths=(length,), size=size).responses([1])
        rank, slot = owner(responses.layout, 0, length - 2)
        told = share([torch.arange(length - 1)], responses, rank)
        assert told[responses.slots(rank) == slot].tolist() == [length - 2]
        shortcut = responses.slots(0)[-1:].tolist()
        missed += (rank, [slot]) != (0, shortcut)
    assert missed > 0


def test_bad_layouts_are_errors():
    with pytest.raises(ValueError, match="one rank"):
        SequenceLayout(kind="none", lengths=(3,), size=2)
    with pytest.raises(ValueError, match="positive"):
        SequenceLayout(kind="zigzag", lengths=(3,), size=0)
    with pytest.raises(ValueError, match="negative"):
        SequenceLayout(kind="zigzag", lengths=(-1,), size=2)
    layout = SequenceLayout(kind="zigzag", lengths=(3, 4), size=2)
    with pytest.raises(ValueError, match=r"lengths \(3,\)"):
        layout.split([torch.zeros(3)], 0)
    with pytest.raises(ValueError, match="1 prompts for 2"):
        layout.responses([1])
    with pytest.raises(ValueError, match="prompt of 0"):
        layout.responses([0, 1])
