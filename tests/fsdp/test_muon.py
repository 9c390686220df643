"""Muon over ranks is Muon of one process in numpy, however its matrices are cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import Model, Oracle, build_model, relative_distance
from tests.fsdp.jobs import NORMALIZER, rows_of
from tests.fsdp.oracle import STEPS, Tensors, as_stored_names, read_ranks
from tests.fsdp.test_checkpoints import resume, save
from tests.fsdp.test_critic import check_critic
from tests.models.families import CASES as ALL
from tests.models.families import Case, build
from tests.muon_oracle import MuonOracle, TorchMuonOracle
from tests.rank_pool import Pool

fast = pytest.mark.fast
OPTIM: dict[str, Any] = {
    "kind": "muon",
    "muon": {"newton_schulz_dtype": "float32"},
    "learning_rate": 5e-3,
    "epsilon": 1e-5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}
TRAINER = {"optim": OPTIM}
NARROW = {"optim": {**OPTIM, "muon": {}}}
CASES = [
    pytest.param("qwen3", 1, {}, id="one rank"),
    pytest.param("qwen3", 2, {}, id="two ranks", marks=fast),
    pytest.param("qwen3", 4, {}, id="four ranks"),
    pytest.param("qwen3", 3, {}, id="three ranks, whose parts differ"),
    pytest.param("llama", 4, {}, id="tied, four ranks"),
    pytest.param("qwen3_moe", 2, {}, id="experts", marks=fast),
    pytest.param("qwen3_moe", 4, {}, id="experts, four ranks"),
    pytest.param("qwen3", 2, {"tensor": 2}, id="TP2"),
    pytest.param("qwen3_moe", 2, {"tensor": 2}, id="TP2, experts", marks=fast),
    pytest.param("qwen3_moe", 4, {"tensor": 2}, id="TP2 x DP2, experts"),
    pytest.param("deepseek_v3", 4, {"tensor": 2}, id="TP2 x DP2, latent"),
    pytest.param("qwen3_moe", 4, {"replicas": 2}, id="experts, two replicas"),
    pytest.param("qwen3_moe", 2, {"expert": 2}, id="EP2", marks=fast),
    pytest.param("qwen3_moe", 4, {"expert": 2}, id="EP2 of four"),
    pytest.param("qwen3_moe", 4, {"expert": 2, "replicas": 2}, id="EP2, two replicas"),
    pytest.param("qwen3", 2, {"context": 2}, id="CP2"),
    pytest.param("qwen3_moe", 4, {"context": 2}, id="CP2 x DP2, experts"),
    pytest.param("qwen3", 2, {"reduce": "call"}, id="reduced once a call"),
    pytest.param("qwen3_moe", 2, {"activation_checkpointing": True}, id="run again"),
]


class Trained:
    """Checkpoints, and what the oracle makes of each in some steps."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._added: dict[str, Model] = {}
        self.model = cache(self._model)
        self.expected = cache(self._expected)

    def _model(self, family: str) -> Model:
        return self._added.get(family) or build_model(self._root / family, family)

    def add(self, case: Case) -> str:
        """Build a model of `tests.models`; its name here."""
        name = f"{case.name} of all"
        if name not in self._added:
            self._added[name] = build(case, self._root / name)
        return name

    def _expected(
        self, family: str, kind: type[Oracle], steps: int = STEPS
    ) -> tuple[list[float], Tensors]:
        torch.set_num_threads(1)
        optim = OptimConfig.model_validate(OPTIM)
        oracle = kind(self.model(family).load(), optim)
        norms = [oracle.step(oracle.ppo_loss(rows_of(i)), NORMALIZER) for i in range(steps)]
        named = {name: p.detach() for name, p in oracle.model.named_parameters()}
        return norms, as_stored_names(oracle.model, named)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("muon"))


def farthest(model: Model, found: Tensors, expected: Tensors) -> float:
    """Of what was added to each tensor, relative to what should have been."""
    start = load_file(model.directory / "model.safetensors")
    assert expected.keys() <= found.keys()
    return max(
        relative_distance(found[name] - start[name], expected[name] - start[name])
        for name in expected
    )


@pytest.mark.parametrize(("family", "world", "fsdp"), CASES)
def test_five_steps_are_those_of_one_process(
    pool: Pool, trained: Trained, tmp_path: Path, family: str, world: int, fsdp: Any
) -> None:
    model = trained.model(family)
    norms, expected = trained.expected(family, MuonOracle)
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": TRAINER}
    for answer in pool.run("parity", world, fsdp=fsdp, **arguments):
        found = [step["grad_norm"] for step in answer["steps"]]
        assert found == pytest.approx(norms, rel=1e-3)
    weights = read_ranks(tmp_path, "weights")
    assert farthest(model, weights, expected) < 5e-4
    _, others = trained.expected(family, Oracle)
    assert farthest(model, weights, others) > 0.2, "steps of AdamW are not told apart"


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("gpt2", 2, {}, id="stored [in, out]"),
        pytest.param("gpt_oss", 2, {}, id="experts stored [in, out]"),
        pytest.param("granitemoe", 2, {}, id="gate and up stored in one"),
        pytest.param("qwen2_moe", 4, {}, id="fewer rows than ranks", marks=fast),
        pytest.param("qwen2_moe", 4, {"tensor": 2}, id="whole on tensor ranks"),
        pytest.param("qwen3_5_moe_text", 2, {}, id="recurrent"),
        pytest.param("qwen3_next", 4, {"tensor": 2}, id="recurrent, TP2 x DP2"),
        pytest.param("jamba", 2, {}, id="decays with two dimensions"),
        pytest.param("qwen2_moe", 4, {"expert": 2}, id="EP2 x DP2"),
        pytest.param("mixtral", 4, {"expert": 2, "replicas": 2}, id="EP2, two replicas"),
        pytest.param("phi3", 2, {"tensor": 2}, id="queries, keys and values in one"),
        pytest.param("mixtral", 4, {"replicas": 2}, id="two replicas"),
    ],
)
def test_other_families_step_alike(
    pool: Pool, trained: Trained, tmp_path: Path, family: str, world: int, fsdp: Any
) -> None:
    name = trained.add(next(case for case in ALL if case.model_type == family))
    model = trained.model(name)
    _, expected = trained.expected(name, MuonOracle, 2)
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": TRAINER}
    pool.run("parity", world, fsdp=fsdp, steps=2, **arguments)
    assert farthest(model, read_ranks(tmp_path, "weights"), expected) < 1e-3


@pytest.mark.parametrize("layout", [{}, {"context": 2}])
def test_masters_move_by_the_gradients_of_passes_in_bfloat16(
    pool: Pool, trained: Trained, tmp_path: Path, layout: Any
) -> None:
    model = trained.model("qwen3")
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": TRAINER}
    fsdp = {"dtype": "bfloat16", **layout}
    answers = pool.run("parity", 2, fsdp=fsdp, steps=1, **arguments)
    norm = answers[0]["steps"][0]["grad_norm"]
    clip = min(1.0, OPTIM["max_grad_norm"] / (norm + 1e-6)) / NORMALIZER
    oracle = MuonOracle(model.load(), OptimConfig.model_validate(OPTIM))
    gradients = read_ranks(tmp_path, "gradients")
    expected = {
        name: oracle._stepped((name, 0), parameter.detach(), gradients[name].float() * clip)
        for name, parameter in oracle.hidden.items()
    }
    assert farthest(model, read_ranks(tmp_path, "weights"), expected) < 1e-3


@pytest.mark.parametrize(
    ("family", "world"), [("qwen3", 2), pytest.param("qwen3_moe", 2, marks=fast), ("qwen3_moe", 4)]
)
def test_copies_of_the_reference_backend_step_alike(
    pool: Pool, trained: Trained, tmp_path: Path, family: str, world: int
) -> None:
    model = trained.model(family)
    norms, expected = trained.expected(family, MuonOracle)
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": TRAINER}
    answers = pool.run("on_copies", world, **arguments)
    for answer in answers:
        assert answer["norms"] == pytest.approx(norms, rel=1e-3)
    assert len({answer["digest"] for answer in answers}) == 1
    assert farthest(model, read_ranks(tmp_path, "weights"), expected) < 5e-4


@pytest.mark.parametrize(
    ("world", "fsdp"),
    [pytest.param(2, {}, marks=fast), (4, {"tensor": 2}), (4, {"replicas": 2})],
)
def test_iterations_in_bfloat16_are_those_of_torch(
    pool: Pool, trained: Trained, tmp_path: Path, world: int, fsdp: Any
) -> None:
    model = trained.model("qwen3_moe")
    _, expected = trained.expected("qwen3_moe", TorchMuonOracle, 1)
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": NARROW}
    pool.run("parity", world, fsdp=fsdp, steps=1, **arguments)
    weights = read_ranks(tmp_path, "weights")
    assert farthest(model, weights, expected) < 0.05
    _, exact = trained.expected("qwen3_moe", MuonOracle, 1)
    assert farthest(model, weights, exact) > 0.1


@pytest.mark.parametrize(
    ("family", "world", "fsdp"),
    [
        pytest.param("qwen3_moe", 2, {}, marks=fast),
        ("qwen3", 2, {"tensor": 2}),
        ("qwen3", 4, {"replicas": 2}),
    ],
)
def test_a_run_goes_on_to_the_bit(
    pool: Pool, trained: Trained, tmp_path: Path, family: str, world: int, fsdp: Any
) -> None:
    model = trained.model(family).directory
    saved = save(pool, tmp_path, model, world, fsdp=fsdp, trainer=NARROW)
    resumed = resume(pool, tmp_path, model, world, fsdp=fsdp, trainer=NARROW)
    assert [answer["steps"] for answer in resumed] == [answer["steps"] for answer in saved]
    before, after = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("world", "other", "before", "after"),
    [
        pytest.param(2, 1, {}, {}, marks=fast),
        (1, 4, {}, {"tensor": 2}),
        (4, 2, {"tensor": 2}, {"context": 2}),
        (2, 4, {}, {"replicas": 2}),
    ],
)
def test_on_other_ranks_it_goes_on_as_it_would_have(
    pool: Pool, trained: Trained, tmp_path: Path, world: int, other: int, before: Any, after: Any
) -> None:
    model = trained.model("qwen3_moe")
    save(pool, tmp_path, model.directory, world, fsdp=before, trainer=TRAINER)
    answers = resume(pool, tmp_path, model.directory, other, fsdp=after, trainer=TRAINER)
    assert not any("error" in answer for answer in answers)
    should, found = (read_ranks(tmp_path / part, "weights") for part in ("saved", "resumed"))
    assert farthest(model, found, should) < 5e-4


@fast
def test_a_checkpoint_of_adamw_is_refused_on_every_rank(
    pool: Pool, trained: Trained, tmp_path: Path
) -> None:
    model = trained.model("qwen3").directory
    save(pool, tmp_path, model, 2)
    answers = resume(pool, tmp_path, model, 2, trainer=TRAINER)
    assert all("saved by a trainer with optim.kind adamw" in each["error"] for each in answers)


@fast
def test_no_rank_has_more_than_one_whole_matrix_and_all_make_as_many(
    pool: Pool, trained: Trained, tmp_path: Path
) -> None:
    model = str(trained.model("qwen3").directory)
    answers = pool.run("gathered", 2, model=model, out=str(tmp_path), trainer=TRAINER)
    assert [answer["made"] for answer in answers] == [7, 7]  # of two layers of seven
    assert [answer["most"] for answer in answers] == [1, 1]


@pytest.mark.parametrize("fsdp", [{}, {"tensor": 2}])
def test_a_critic_learns_as_on_the_reference_backend(
    pool: Pool, trained: Trained, tmp_path: Path, fsdp: Any
) -> None:
    check_critic(pool, trained.model("qwen3"), tmp_path, 2, fsdp=fsdp, trainer=TRAINER)
