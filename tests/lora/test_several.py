"""Several adapters on one base, trained by turns: each is what peft makes of it alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice.weights.adapter import ADAPTER_FILE
from tests.contract.training_backend.cases import build_model
from tests.fsdp.oracle import logprob_difference, read_ranks
from tests.lora.conftest import ExpectedAdapters
from tests.lora.oracle import ALL, ExpectedUser, User, expect_user
from tests.models.families import CASES, build
from tests.rank_pool import Pool

fast = pytest.mark.fast
STEPS = 4
USERS = {
    "": User(rank=4, alpha=10.0, targets=ALL, rate=2e-3, first=0),
    "alice": User(rank=4, alpha=10.0, targets=ALL, rate=1e-3, first=10),
    "bob.7-b": User(rank=2, alpha=3.0, targets=("q_proj", "down_proj"), rate=5e-4, first=20),
    "carol": User(rank=8, alpha=8.0, targets=("v_proj", "o_proj"), rate=1.5e-3, first=30),
}
TENSOR = {"tensor": 2, "sequence_parallel": True}
PLACES = [
    pytest.param("reference", 1, {}, marks=fast, id="reference"),
    pytest.param("reference", 2, {}, id="reference, two ranks"),
    pytest.param("fsdp", 2, {}, marks=fast, id="fsdp, two ranks"),
    pytest.param("fsdp", 4, {}, id="fsdp, four ranks"),
    pytest.param("fsdp", 2, {"tensor": 2}, id="fsdp, tensor 2"),
    pytest.param("megatron", 1, {}, id="megatron"),
    pytest.param("megatron", 2, {"tensor": 2}, id="tensor 2"),
    pytest.param("megatron", 2, TENSOR, marks=fast, id="tensor 2, sequence"),
    pytest.param("megatron", 2, {"pipeline": 2}, id="pipeline 2"),
    pytest.param("megatron", 4, {**TENSOR, "pipeline": 2}, id="tensor 2, sequence, pipeline 2"),
    pytest.param("megatron", 2, {}, id="data 2"),
    pytest.param("megatron", 4, TENSOR, id="data 2, tensor 2, sequence"),
    pytest.param("megatron", 2, {"context": 2}, id="context 2"),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("several") / "model", "qwen3").directory


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExpectedUser]:
    root = tmp_path_factory.mktemp("alone")
    model = build_model(root / "model", "qwen3")
    return {
        name: expect_user(model, user, root / (name or "own"), STEPS)
        for name, user in USERS.items()
    }


def train(
    pool: Pool,
    model: Path,
    alone: dict[str, ExpectedUser],
    out: Path,
    backend: str,
    world: int,
    users: dict[str, User],
    **more: Any,
) -> list[dict[str, Any]]:
    """The first user's adapter is that of the settings where it has no name."""
    out.mkdir(exist_ok=True)
    told = {
        name: {
            "settings": user.settings,
            "adapter": str(more.get("adapter") or alone[name].adapter),
            "rate": user.rate,
            "first": user.first,
        }
        for name, user in users.items()
    }
    own = users.get("", USERS[""])
    arguments = {"backend": backend, "model": str(model), "out": str(out), "steps": STEPS, **more}
    arguments["adapter"] = ""
    return pool.run("several", world, lora=own.settings, users=told, **arguments)


Together = Callable[[str, int, dict[str, Any]], tuple[list[dict[str, Any]], Path]]


@pytest.fixture(scope="module")
def together(
    pool: Pool,
    model: Path,
    alone: dict[str, ExpectedUser],
    tmp_path_factory: pytest.TempPathFactory,
) -> Together:
    """What all of them come to in one trainer, and where: each place is trained in once."""
    made: dict[str, tuple[list[dict[str, Any]], Path]] = {}

    def train_all(
        backend: str, world: int, layout: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], Path]:
        place = f"{backend} {world} {layout}"
        if place not in made:
            out = tmp_path_factory.mktemp("together")
            made[place] = (
                train(pool, model, alone, out, backend, world, USERS, layout=layout),
                out,
            )
        return made[place]

    return train_all


@pytest.mark.parametrize(("backend", "world", "layout"), PLACES)
def test_each_is_what_peft_makes_of_it_alone(
    alone: dict[str, ExpectedUser],
    together: Together,
    backend: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    answers, of_all = together(backend, world, layout)
    assert all(answer["frozen"] for answer in answers)
    bases = []
    for name, expected in alone.items():
        folder = of_all / (name or "own")
        for answer in answers:
            for found, should in zip(answer["steps"][name], expected.steps, strict=True):
                assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
                assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)
        assert logprob_difference(read_ranks(folder, "logprobs"), expected.logprobs) <= 5e-6
        published = load_file(folder / ADAPTER_FILE)
        assert published.keys() == expected.tensors.keys()
        for tensor_name, tensor in expected.tensors.items():
            assert (published[tensor_name] - tensor).abs().max() < 2e-4, (name, tensor_name)
        bases.append(read_ranks(folder, "base"))
    for base in bases[1:]:  # that of all is one, whoever asks
        assert all(torch.equal(base[sample], values) for sample, values in bases[0].items())


@pytest.mark.parametrize(("backend", "world", "layout"), PLACES)
def test_each_is_to_the_bit_what_it_is_in_a_trainer_of_its_own(
    pool: Pool,
    model: Path,
    alone: dict[str, ExpectedUser],
    together: Together,
    tmp_path: Path,
    backend: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    answers, of_all = together(backend, world, layout)
    for name in ("alice", "bob.7-b"):
        out = tmp_path / name
        single = {"": USERS[name]}
        adapter = alone[name].adapter
        more = {"adapter": adapter, "layout": layout}
        apart = train(pool, model, alone, out, backend, world, single, **more)
        assert [a["steps"][""] for a in apart] == [a["steps"][name] for a in answers]
        found = load_file(of_all / name / ADAPTER_FILE)
        for tensor_name, tensor in load_file(out / "own" / ADAPTER_FILE).items():
            assert torch.equal(found[tensor_name], tensor), tensor_name


@pytest.mark.parametrize(
    ("backend", "world", "layout"),
    [pytest.param("reference", 1, {}, marks=fast), ("megatron", 2, TENSOR)],
)
def test_with_one_optimizer_for_two_it_would_not_be(
    pool: Pool,
    model: Path,
    alone: dict[str, ExpectedUser],
    tmp_path: Path,
    backend: str,
    world: int,
    layout: dict[str, Any],
) -> None:
    two = {"": USERS[""], "alice": USERS["alice"]}
    train(pool, model, alone, tmp_path, backend, world, two, sharing=True, layout=layout)
    found = read_ranks(tmp_path / "alice", "logprobs")
    assert logprob_difference(found, alone["alice"].logprobs) > 1e-3


@pytest.mark.parametrize(
    ("backend", "world"),
    [pytest.param("reference", 1, marks=fast), ("fsdp", 2), ("megatron", 1)],
)
def test_an_adapter_costs_its_own_numbers_and_not_the_base(
    pool: Pool, model: Path, tmp_path: Path, backend: str, world: int
) -> None:
    lora = USERS["carol"].settings
    arguments = {"backend": backend, "model": str(model), "out": str(tmp_path), "lora": lora}
    for answer in pool.run("growth", world, count=6, **arguments):
        held = answer["held"]
        # its factors, their gradients, two moments, and the count of steps of each tensor
        each = 4 * answer["adapter"] + 4 * answer["tensors"]
        assert [after - before for before, after in pairwise(held)] == [each] * 5
        assert each < held[0] / 3
        assert answer["left"] == held[-1] - each
        assert answer["hooks"] == [0, 1]  # of a layer, however many adapters


def test_experts_that_one_recorded_outlive_the_steps_of_others(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path
) -> None:
    """Rows of both have the same names, and other tokens would be refused."""
    moe = expected("qwen3_moe")
    losses = []
    for users in (["alice"], ["alice", "bob"]):
        arguments = {"model": str(moe.directory), "out": str(tmp_path), "lora": moe.settings}
        (answer,) = pool.run(
            "replayed",
            1,
            backend="megatron",
            layout={"routing_replay": "recorded"},
            users=dict.fromkeys(users, str(moe.adapter)),
            **arguments,
        )
        losses.append(answer["losses"])
    assert losses[0] == losses[1]
    assert losses[0][0] == pytest.approx(moe.steps[0]["loss"], abs=1e-4)


def test_what_a_stage_has_no_layer_for_is_refused_and_costs_the_others_nothing(
    pool: Pool, tmp_path: Path
) -> None:
    """The first of two stages has a delta net, the second attention, which alone has `q_proj`."""
    (case,) = (case for case in CASES if case.name == "qwen3_next")
    model = build(case, tmp_path / "model")
    found = []
    for targets in (["q_proj"], ["out_proj", "q_proj"]):
        found.append(
            pool.run(
                "refused",
                2,
                backend="megatron",
                model=str(model.directory),
                out=str(tmp_path),
                layout={"pipeline": 2},
                lora={"rank": 4, "targets": ["q_proj", "o_proj", "out_proj"]},
                other={"rank": 2, "targets": targets},
            )
        )
    first, second = (answer["reason"] for answer in found[0])
    assert first == "pipeline stage 0 has no layer of lora.targets"
    assert not second
    assert not any(answer["reason"] for answer in found[1])
    assert [a["steps"] for a in found[0]] == [a["steps"] for a in found[1]]
    assert found[0][0]["steps"][0]["grad_norm"] > 0
