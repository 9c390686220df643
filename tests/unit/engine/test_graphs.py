"""Decode passes that are replayed give what plain ones give, whatever happens between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from services.rollout import metrics
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta
from services.rollout.engine.reference import graphs
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.engine import ReferenceEngine
from services.rollout.engine.reference.loading import PreparedWeights
from services.rollout.errors import UnsupportedModelError
from sluice import platform
from tests.contract.engine.cases import Model, build_model, request_of
from tests.recording_device import CaptureError, Recorder, recording_device

CreateCore = Callable[..., EngineCore]
Drawn = dict[tuple[int, int], tuple[list[int], list[float], list[int]]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=7)


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MET", 1)


def passes() -> dict[str, float]:
    found = {
        sample.labels["kind"]: sample.value
        for metric in metrics.DECODE_PASSES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return found


def with_graphs(create_core: CreateCore, model: Model, **settings: Any) -> EngineCore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "current", recording_device)
        return create_core(model.directory, decode_graphs="on", **settings)


class Both:
    """A core that replays and one that does not, which are told the same."""

    def __init__(self, create_core: CreateCore, model: Model, **settings: Any) -> None:
        self.replaying = with_graphs(create_core, model, **settings)
        self.plain = create_core(model.directory, **settings)
        self.drawn: tuple[Drawn, Drawn] = ({}, {})

    def tell(self, what: Callable[[EngineCore], object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "current", recording_device)
            what(self.replaying)
        what(self.plain)
        for core, drawn in zip((self.replaying, self.plain), self.drawn, strict=True):
            for key, delta in core.take_outbox():
                assert isinstance(delta, Delta)
                tokens, logprobs, versions = drawn.setdefault((key, delta.index), ([], [], []))
                tokens.extend(delta.token_ids)
                logprobs.extend(delta.logprobs)
                for span in delta.spans:
                    versions += [span.version] * (span.last_token - span.first_token + 1)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.tell(lambda core: core.step() if core.has_work else None)

    def serve(self, model: Model, version: int) -> None:
        def swap(core: EngineCore) -> None:
            assert core.model is not None
            own = {name: p.clone() for name, p in model.module.named_parameters()}
            weights = core.model.adopt(own)
            core.serve(core.model, PreparedWeights(version, f"{version:032x}", weights))

        self.tell(swap)

    def finish(self) -> None:
        while self.plain.has_work or self.replaying.has_work:
            self.step()

    def check(self) -> None:
        found, wanted = self.drawn
        assert found.keys() == wanted.keys()
        for key, (tokens, logprobs, versions) in wanted.items():
            assert (found[key][0], found[key][2]) == (tokens, versions), key
            assert found[key][1] == pytest.approx(logprobs, abs=2e-5)


def ask(key: int, rng: random.Random, **sampling: Any) -> Callable[[EngineCore], None]:
    """A prompt of up to 60 tokens, so that rows are of several sizes."""
    prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 60))]
    count = rng.randrange(1, 4)
    settings = {
        "max_new_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0.0, 1.0, 0.7]),
        "seeds": tuple(rng.randrange(1 << 40) for _ in range(count)),
        "stop_token_ids": (5, 6),
        **sampling,
    }
    stream = rng.random() < 0.5
    request = request_of(str(key), prompt, count, stream=stream, **settings)
    return lambda core: core.submit(key, request)


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30))
def test_any_order_of_things_gives_what_plain_passes_give(
    seed: int, qwen3: Model, other: Model, create_core: CreateCore
) -> None:
    """Requests come, end, stop and are aborted, rows outgrow theirs, weights change on the way."""
    rng = random.Random(seed)
    both = Both(create_core, qwen3, max_running=11, prefill_chunk_tokens=40)
    key = version = 0
    for _ in range(10):
        what = rng.random()
        if what < 0.5:
            key += 1
            both.tell(ask(key, rng))
        elif what < 0.65 and key:
            gone = str(rng.randrange(1, key + 1))
            both.tell(lambda core, gone=gone: core.abort([gone]))
        elif what < 0.8:
            version += 1
            both.serve(rng.choice([qwen3, other]), version)
        both.step(rng.randrange(9))
    both.finish()
    both.check()


def test_most_passes_are_replayed(qwen3: Model, create_core: CreateCore) -> None:
    before = passes()
    both = Both(create_core, qwen3)
    for key in range(1, 6):
        both.tell(ask(key, random.Random(key), max_new_tokens=30, stop_token_ids=()))
    both.finish()
    both.check()
    made = {run: count - before[run] for run, count in passes().items()}
    assert made["replayed"] > 20 > made["plain"]
    assert made["captured"] <= made["plain"]


def served_twice(both: Both, other: Model) -> None:
    both.tell(ask(1, random.Random(3), max_new_tokens=40, stop_token_ids=(), temperature=0.0))
    both.step(9)
    both.serve(other, 1)
    both.finish()
    both.check()


def test_graphs_of_other_weights_would_show(
    qwen3: Model, other: Model, create_core: CreateCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_twice(Both(create_core, qwen3), other)
    monkeypatch.setattr(graphs.DecodeGraphs, "clear", lambda self: None)
    with pytest.raises((AssertionError, CaptureError)):
        served_twice(Both(create_core, qwen3), other)


def grown(both: Both) -> None:
    """Rows of one size get more memory behind a graph's back."""
    for key, count in {1: 2, 2: 9}.items():
        request = request_of(
            str(key), [key, 2, 3], count, max_new_tokens=12, seeds=tuple(range(count))
        )
        both.tell(lambda core, key=key, request=request: core.submit(key, request))
        both.step(4 if key == 1 else 2)
    both.tell(lambda core: core.abort(["2"]))
    both.step(2)
    both.finish()
    both.check()


def test_graphs_of_a_store_that_has_grown_would_show(
    qwen3: Model, create_core: CreateCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(Both(create_core, qwen3))
    monkeypatch.setattr(graphs.DecodeGraphs, "_forget_moved", lambda self, blocks: None)
    with pytest.raises(AssertionError):
        grown(Both(create_core, qwen3))


def test_a_replay_is_as_strict_as_an_accelerator() -> None:
    """Or the tests above would show nothing."""
    source, number = torch.ones(3), 2.0
    with Recorder() as recorder:
        made = (source * number)[1:] + 1
    source.fill_(4.0)
    number = 5.0
    recorder.replay()
    assert made.tolist() == [9.0, 9.0]
    for wait in (lambda: source.sum().item(), lambda: source[source > 1], lambda: source.nonzero()):
        with pytest.raises(CaptureError), Recorder():
            wait()


@pytest.mark.parametrize(
    ("count", "lanes"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (255, 256), (257, 512)]
)
def test_lanes_are_rounded_up(count: int, lanes: int) -> None:
    assert graphs.bucket(count) == lanes


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"backend": "sglang"}, "no effect with backend sglang"),
        ({"deterministic": True}, "deterministic runs one shape"),
    ],
)
def test_what_they_do_not_go_with_is_refused(values: dict[str, Any], said: str) -> None:
    for choice in ("on", "auto"):
        with pytest.raises(ValidationError, match=said):
            EngineConfig.model_validate({"decode_graphs": choice, **values})


@pytest.fixture
def on_cpu() -> Iterator[None]:
    platform.current.cache_clear()
    yield
    platform.current.cache_clear()


async def test_where_nothing_is_captured_on_is_refused_and_auto_is_plain(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "current", lambda: platform.CPU)
    refused = ReferenceEngine(EngineConfig(model=str(qwen3.directory), decode_graphs="on"))
    with pytest.raises(UnsupportedModelError, match=r"decode_graphs: on cannot be: .* on cpu"):
        await refused.start()
    await refused.close()
    plain = ReferenceEngine(EngineConfig(model=str(qwen3.directory), decode_graphs="auto"))
    await plain.start()
    assert plain._core._graphs is None
    await plain.close()


async def test_a_model_that_cannot_be_captured_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.contract.engine.cases import SIZES

    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(platform, "current", recording_device)
    for choice, refused in (("on", True), ("auto", False)):
        engine = ReferenceEngine(EngineConfig(model=str(tmp_path), decode_graphs=choice))
        if refused:
            with pytest.raises(UnsupportedModelError, match="experts"):
                await engine.start()
        else:
            await engine.start()
            assert engine._core._graphs is None
        await engine.close()
