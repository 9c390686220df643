"""Scheduling, step by step: who runs when, and what it costs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.rollout.engine.interface import Delta, FinishReason, PauseMode
from services.rollout.engine.reference.attention import DecodeBlock
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.loading import open_model
from services.rollout.errors import NonFiniteLogitsError
from tests.contract.engine.cases import Model, build_model, request_of

CreateCore = Callable[..., EngineCore]


def drawn(core: EngineCore) -> dict[int, int]:
    """Tokens handed out since the last call, by key."""
    counts: dict[int, int] = {}
    for key, outcome in core.take_outbox():
        assert isinstance(outcome, Delta)
        counts[key] = counts.get(key, 0) + len(outcome.token_ids)
    return counts


def finish(core: EngineCore, steps: int = 1000) -> None:
    for _ in range(steps):
        if not core.has_work:
            return
        core.step()
    raise AssertionError("the core does not come to rest")


def test_a_late_request_joins_within_one_step(qwen3: Model, create_core: CreateCore) -> None:
    core = create_core(qwen3.directory)
    core.submit(1, request_of("a", [1, 2], max_new_tokens=50, stream=True))
    for _ in range(5):
        core.step()
    assert drawn(core) == {1: 5}
    core.submit(2, request_of("b", [3], 2, max_new_tokens=50, stream=True))
    core.step()
    assert drawn(core) == {1: 1, 2: 2}
    core.step()
    assert drawn(core) == {1: 1, 2: 2}


def test_a_prompt_is_encoded_once_for_all_its_samples(
    qwen3: Model, create_core: CreateCore
) -> None:
    core = create_core(qwen3.directory, max_running=6)
    core.submit(1, request_of("a", list(range(40)), 16, max_new_tokens=3))
    core.submit(2, request_of("b", [1, 2, 3], 4, max_new_tokens=3))
    finish(core)
    assert core.prefill_tokens == 43
    assert core.drawn_tokens == 20 * 3


def test_prompt_chunks_are_bounded_and_decoding_goes_on_between_them(
    qwen3: Model, create_core: CreateCore
) -> None:
    core = create_core(qwen3.directory, prefill_chunk_tokens=10)
    core.submit(1, request_of("a", [1], max_new_tokens=50, stream=True))
    core.step()
    core.submit(2, request_of("b", [2] * 35, max_new_tokens=50, stream=True))
    core.submit(3, request_of("c", [2] * 12, max_new_tokens=50, stream=True))
    drawn(core)
    seen, encoded = [], core.prefill_tokens
    for _ in range(5):
        core.step()
        assert core.prefill_tokens - encoded <= 10
        encoded = core.prefill_tokens
        seen.append(drawn(core))
    assert seen == [{1: 1}, {1: 1}, {1: 1}, {1: 1, 2: 1}, {1: 1, 2: 1, 3: 1}]


def test_a_long_neighbour_costs_a_short_request_nothing(
    qwen3: Model, create_core: CreateCore
) -> None:
    core = create_core(qwen3.directory, prefill_chunk_tokens=2000)
    core.submit(1, request_of("long", [1] * 1500, max_new_tokens=50))
    for key in range(2, 30):
        core.submit(key, request_of(str(key), [1] * 8, max_new_tokens=50))
    for _ in range(4):
        core.step()
    assert core._batch is not None
    blocks = [b for b in core._batch.inputs()[2] if isinstance(b, DecodeBlock)]
    attended = sum(block.count * block.length for block in blocks)
    own = (1500 + 4) + 28 * (8 + 4)
    assert attended <= 1.1 * own


def test_requests_start_in_order_and_within_slots(qwen3: Model, create_core: CreateCore) -> None:
    core = create_core(qwen3.directory, max_running=4)
    for key in range(1, 5):
        core.submit(key, request_of(str(key), [key], 3, max_new_tokens=4))
    order: list[int] = []
    while core.has_work:
        core.step()
        assert core.running_count <= 4
        order += [key for key, _ in core.take_outbox()]
    assert order == sorted(order)
    assert len(order) == 12


@pytest.mark.parametrize("room", [{"max_running": 2}, {"max_cached_tokens": 45}])
def test_a_prompt_is_not_encoded_before_there_is_room_for_a_sample(
    qwen3: Model, create_core: CreateCore, room: dict
) -> None:
    core = create_core(qwen3.directory, **room)
    core.submit(1, request_of("a", [1], 2, max_new_tokens=10))
    core.step()
    core.submit(2, request_of("b", [1] * 30, max_new_tokens=10))
    core.step()
    assert core.prefill_tokens == 1
    finish(core)
    assert core.prefill_tokens == 31


def test_reserved_tokens_bound_who_runs(qwen3: Model, create_core: CreateCore) -> None:
    core = create_core(qwen3.directory, max_cached_tokens=60)
    for key in range(1, 8):
        core.submit(key, request_of(str(key), [key] * 10, 4, max_new_tokens=15))
    highest = 0
    while core.has_work:
        core.step()
        highest = max(highest, core.reserved_tokens)
    assert highest == 50
    assert core.reserved_tokens == core.waiting_count == 0
    assert len(core.take_outbox()) == 28


def test_a_swap_moves_pointers_whatever_the_size(tmp_path, create_core: CreateCore) -> None:
    class CountOps(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    for family in ("qwen3", "llama"):  # untied and tied embeddings
        directory = build_model(tmp_path / family, family, seed=0).directory
        core = create_core(directory)
        core.submit(1, request_of("a", [1, 2], 3, max_new_tokens=50))
        core.step()
        model = core.model
        assert model is not None
        _, weights = open_model(directory, torch.float32, torch.device("cpu"))
        core.take_outbox()
        with CountOps() as ops:
            core.serve(model, weights)
        assert ops.count <= 3  # how many tokens each lane has; nothing per parameter
        live = dict(model.module.named_parameters(remove_duplicate=False))
        assert all(live[n].data_ptr() == p.data_ptr() for n, p in weights.parameters.items())
        tied = model.module.get_output_embeddings().weight
        assert (tied.data_ptr() == live["model.embed_tokens.weight"].data_ptr()) == (
            family == "llama"
        )


def test_what_served_before_is_freed_by_whoever_takes_it(tmp_path, create_core: CreateCore) -> None:
    """To free gigabytes takes milliseconds: not in the pause."""
    directory = build_model(tmp_path, "qwen3", seed=0).directory
    core = create_core(directory)
    assert core.model is not None
    served = [weakref.ref(parameter) for parameter in core.model.module.parameters()]
    _, weights = open_model(directory, torch.float32, torch.device("cpu"))
    retired = core.serve(core.model, weights)
    assert all(reference() is not None for reference in served)
    retired.clear()
    assert not any(reference() is not None for reference in served)


def test_samples_that_begin_after_a_swap_are_of_the_new_weights_alone(
    qwen3: Model, tmp_path, create_core: CreateCore
) -> None:
    other = build_model(tmp_path / "other", "qwen3", seed=1)
    core = create_core(qwen3.directory, max_running=1)
    core.submit(1, request_of("a", [1, 2, 3], 2, max_new_tokens=5))
    core.step()
    model = core.model
    assert model is not None
    _, weights = open_model(other.directory, torch.float32, torch.device("cpu"))
    core.serve(model, weights)
    finish(core)
    (_, first), (_, second) = core.take_outbox()
    assert isinstance(first, Delta)
    assert isinstance(second, Delta)
    assert [(s.first_token, s.last_token) for s in first.spans] == [(0, 0), (1, 4)]
    assert [span.digest for span in second.spans] == [weights.digest]
    expected = other.logprobs([1, 2, 3], second.token_ids)
    assert second.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_scoring_across_a_swap_is_of_the_new_weights_alone(
    qwen3: Model, tmp_path, create_core: CreateCore
) -> None:
    other = build_model(tmp_path / "other", "qwen3", seed=1)
    core = create_core(qwen3.directory, prefill_chunk_tokens=4)
    text = list(range(20))
    core.submit_score(1, text, 2)
    core.step()
    model = core.model
    assert model is not None
    core.pause(PauseMode.ABORT)  # aborts requests, but a scoring has no part to hand out
    core.serve(model, open_model(other.directory, torch.float32, torch.device("cpu"))[1])
    core.resume()
    finish(core)
    ((key, scores),) = core.take_outbox()
    assert key == 1
    assert scores.logprobs == pytest.approx(other.logprobs(text[:2], tuple(text[2:])), abs=1e-4)


def test_weights_that_overflow_fail_what_runs_and_better_ones_serve_again(
    qwen3: Model, create_core: CreateCore
) -> None:
    core = create_core(qwen3.directory)
    core.submit(1, request_of("a", [1], 2, max_new_tokens=50))
    core.step()
    model = core.model
    assert model is not None
    good = open_model(qwen3.directory, torch.float32, torch.device("cpu"))[1]
    bad = open_model(qwen3.directory, torch.float32, torch.device("cpu"))[1]
    bad.parameters["lm_head.weight"].fill_(float("nan"))
    core.serve(model, bad)
    core.submit(2, request_of("b", [1], 2, max_new_tokens=3))
    core.step()
    outcomes = core.take_outbox()
    failed = [key for key, outcome in outcomes if isinstance(outcome, NonFiniteLogitsError)]
    assert failed == [1, 2]
    assert outcomes[0][0] == 1 and isinstance(outcomes[0][1], NonFiniteLogitsError)  # then the rest
    assert not core.has_work
    assert core.reserved_tokens == core.waiting_count == core.running_count == 0
    core.serve(model, good)
    core.submit(3, request_of("c", [1], 2, max_new_tokens=3))
    finish(core)
    assert [o.finish_reason for _, o in core.take_outbox()] == [FinishReason.LENGTH] * 2


def test_a_sample_says_where_its_time_went(qwen3: Model, create_core: CreateCore) -> None:
    core = create_core(qwen3.directory, max_running=1, prefill_chunk_tokens=4)
    began = time.monotonic()
    core.submit(1, request_of("first", list(range(20)), max_new_tokens=6))
    core.submit(2, request_of("second", [3], max_new_tokens=2))
    finish(core)
    wall = time.monotonic() - began
    timings = {}
    for key, outcome in core.take_outbox():
        assert isinstance(outcome, Delta)
        timings[key] = outcome.timing
    first, second = timings[1], timings[2]
    assert first is not None
    assert second is not None
    assert first.prefill > 0
    assert first.decode > 0
    assert second.queue >= first.prefill + first.decode  # there is one slot
    assert first.queue + first.prefill + first.decode <= wall
    assert second.queue + second.prefill + second.decode <= wall


def test_a_bfloat16_engine_makes_its_logits_in_float32_whatever_weights_it_serves(
    qwen3: Model,
) -> None:
    """Rounded to bfloat16 they put log-probs off by about 1e-2, which a trainer's are not."""
    serving, _ = open_model(qwen3.directory, torch.bfloat16, torch.device("cpu"))
    head = serving.module.get_output_embeddings()
    doubled = {name: weight * 2 for name, weight in serving.parameters().items()}
    hidden = torch.randn(1, 64, head.in_features, generator=torch.Generator().manual_seed(0)) * 8
    for _ in range(2):
        exact = hidden.bfloat16().double() @ head.weight.double().T
        rounded = torch.nn.functional.linear(hidden.bfloat16(), head.weight)
        found = head(hidden.bfloat16())
        assert found.dtype == torch.float32 and found.shape == exact.shape
        assert (found - exact).abs().max() < 1e-4 < (rounded - exact).abs().mean()
        serving.swap(serving.fit(doubled))
