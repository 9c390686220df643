"""Gradients of losses of routers are those of plain transformers in float64, row by row.

What steps tell of them is what numpy makes of its logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import linear

from services.trainer.backend import Row
from services.trainer.backends.expert_load import watch_experts
from services.trainer.backends.expert_losses import UnknownRouterError, watch_logits
from services.trainer.config import ExpertsConfig
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import NORMALIZER, rows_of
from tests.fsdp.oracle import Tensors, as_stored_names, gradient_difference, read_ranks
from tests.models.families import CASES, Case, build
from tests.models.forced import ForcedOracle, shape_of, with_experts
from tests.models.proof import MAX_GRADIENT_DIFF
from tests.models.test_expert_load import DEEPSEEK, QWEN, SCATTERED
from tests.models.test_experts import MIXTURES
from tests.rank_pool import Pool

fast = pytest.mark.fast
BY_NAME = {case.name: case for case in CASES}
SINKS = BY_NAME["gpt_oss"]
(GEMMA,) = (case for case in MIXTURES if case.known == "gemma4_text")
AUX, Z = 0.3, 0.05
EXPERTS = {"aux_loss_coefficient": AUX, "z_loss_coefficient": Z}


def routers_of(plain: Any) -> list[Any]:
    """By depth; what they score experts by is a linear layer of theirs, or they are one."""
    kinds = ("TopKRouter", "TopkRouter", "TokenChoiceRouter", "V1Gate")
    found = [m for m in plain.modules() if type(m).__name__.endswith(kinds)]
    linear = (".router", ".router.proj")  # of Jamba and Gemma 4
    return found or [
        m for n, m in plain.named_modules() if n.endswith(linear) and type(m) is torch.nn.Linear
    ]


def scores_of(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """Those of every expert, as the router's own lines say."""
    if "sigmoid" not in inspect.getsource(type(router)):
        return logits.softmax(1)
    return logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)


def values_of(logits: np.ndarray, probabilities: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """What the losses of one layer come to, by which steps tell of them."""
    tokens, count = logits.shape
    shares = np.array([np.sum(ids == expert) for expert in range(count)]) / ids.size
    largest = logits.max(axis=1)
    size = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    return {
        "experts_aux_loss": count * float(shares @ probabilities.sum(axis=0)) / tokens,
        "experts_z_loss": float(np.mean(size**2)),
    }


Values = dict[str, float]
Expected = tuple[Tensors, Values]


def expect(
    model: Model,
    settings: dict[str, float],
    told: list[Row] | None = None,
    step: int = 0,
) -> Expected:
    """Gradients by stored names, of all rows in one loss, and what steps tell of losses.

    Each row is read by itself. told: rows that bring the experts that their tokens go to.
    """
    plain: Any = model.load().double()  # type: ignore[no-untyped-call]
    oracle, routers = (Oracle if told is None else ForcedOracle)(plain), routers_of(plain)
    layers = [m for n, m in plain.named_modules() if n.endswith(".experts")]
    scored = [list[torch.Tensor]() for _ in routers]
    chosen = [list[torch.Tensor]() for _ in routers]

    def score(router: Any, given: tuple[torch.Tensor, ...]) -> None:
        hidden = given[0].reshape(-1, given[0].shape[-1])[:-1]  # the last token predicts nothing
        owner = getattr(router, "gate", getattr(router, "wg", router))
        logits = linear(hidden, owner.weight, getattr(owner, "bias", None))
        scored[routers.index(router)].append(logits)

    def choose(experts: Any, given: tuple[torch.Tensor, ...]) -> None:
        chosen[layers.index(experts)].append(given[1][:-1])

    for router, experts in zip(routers, layers, strict=True):
        router.register_forward_pre_hook(score)
        experts.register_forward_pre_hook(choose)
    loss = oracle.ppo_loss(told or rows_of(step))
    values: list[Values] = []
    for router, parts, choices in zip(routers, scored, chosen, strict=True):
        logits, ids = torch.cat(parts), torch.cat(choices).numpy()
        count = logits.shape[1]
        shares = torch.from_numpy(np.bincount(ids.reshape(-1), minlength=count) / ids.size)
        probabilities = scores_of(router, logits).detach().numpy()
        values.append(values_of(logits.detach().numpy(), probabilities, ids))
        even = count * (shares * scores_of(router, logits).mean(0)).sum()
        small = logits.logsumexp(1).square().mean()
        loss = loss + NORMALIZER * settings.get("aux_loss_coefficient", 0.0) * even
        loss = loss + NORMALIZER * settings.get("z_loss_coefficient", 0.0) * small
    loss.backward()
    named = dict(plain.named_parameters())
    asked = [name.replace("_coefficient", "") for name in settings]
    means = {f"experts_{n}": float(np.mean([v[f"experts_{n}"] for v in values])) for n in asked}
    found = {n: p.grad for n, p in named.items() if p.grad is not None}
    return as_stored_names(plain, found), means


class Known:
    def __init__(self, root: Path) -> None:
        self._root, self._models = root, dict[str, Model]()
        self._made: dict[str, Expected] = {}

    def __call__(self, case: Case, settings: dict[str, float]) -> tuple[Model, Expected]:
        model = f"{case.name}-{case.settings.get('num_hidden_layers')}"
        if model not in self._models:
            self._models[model] = build(case, self._root / model)
        name = f"{model} {sorted(settings)}"
        if name not in self._made:
            self._made[name] = expect(self._models[model], settings)
        return self._models[model], self._made[name]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield Known(tmp_path_factory.mktemp("models"))


def check(out: Path, answers: list[dict[str, Any]], whole: Expected) -> None:
    expected, values = whole
    for answer in answers:
        check_told(answer, values)
    found = read_ranks(out, "gradients")
    idle = {name for name, tensor in expected.items() if not tensor.any()}
    assert all(".experts." in name and not found.pop(name).any() for name in idle)
    expected = {name: tensor for name, tensor in expected.items() if name not in idle}
    assert any("gate" in name or "router" in name for name in found)
    assert gradient_difference(found, expected) <= MAX_GRADIENT_DIFF


def check_told(answer: dict[str, Any], values: Values) -> None:
    """Coefficients are not in it."""
    told = {name: v for name, v in answer["metrics"].items() if name.endswith("_loss")}
    assert told == pytest.approx(values, rel=1e-5)
    assert answer["behind"] == {}, "nothing is left for the next step"


ON_FSDP = [
    pytest.param(QWEN, 1, {}, EXPERTS, id="qwen-1", marks=fast),
    pytest.param(QWEN, 1, {}, {"z_loss_coefficient": Z}, id="qwen-1-z"),
    pytest.param(QWEN, 1, {}, {"aux_loss_coefficient": AUX}, id="qwen-1-aux"),
    pytest.param(QWEN, 2, {}, EXPERTS, id="qwen-2"),
    pytest.param(QWEN, 2, {"expert": 2}, EXPERTS, id="qwen-EP2", marks=fast),
    pytest.param(QWEN, 2, {"tensor": 2}, EXPERTS, id="qwen-TP2", marks=fast),
    pytest.param(QWEN, 2, {"context": 2}, EXPERTS, id="qwen-CP2", marks=fast),
    pytest.param(QWEN, 2, {"replicas": 2}, EXPERTS, id="qwen-HSDP2"),
    pytest.param(
        QWEN, 2, {"activation_checkpointing": True, "expert": 2}, EXPERTS, id="qwen-recompute"
    ),
    pytest.param(DEEPSEEK, 2, {"expert": 2}, EXPERTS, id="deepseek-EP2", marks=fast),
    pytest.param(DEEPSEEK, 2, {"tensor": 2}, EXPERTS, id="deepseek-TP2"),
    pytest.param(
        DEEPSEEK, 2, {"routing_replay": "recorded"}, EXPERTS, id="deepseek-replay", marks=fast
    ),
    pytest.param(SINKS, 2, {}, EXPERTS, id="gpt_oss-2"),
    pytest.param(GEMMA, 2, {"tensor": 2}, EXPERTS, id="gemma4-TP2"),
    pytest.param(GEMMA, 2, {"context": 2}, EXPERTS, id="gemma4-CP2"),
    pytest.param(BY_NAME["jamba"], 2, {"expert": 2}, EXPERTS, id="jamba-EP2"),
    pytest.param(
        BY_NAME["phimoe"], 2, {"context": 2, "activation_checkpointing": True}, EXPERTS, id="phimoe"
    ),
]


@pytest.mark.parametrize(("case", "world", "fsdp", "experts"), ON_FSDP)
def test_on_fsdp(
    pool: Pool,
    known: Known,
    tmp_path: Path,
    case: Case,
    world: int,
    fsdp: dict[str, Any],
    experts: dict[str, float],
) -> None:
    model, expected = known(case, experts)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    answers = pool.run("gradients", world, **arguments, fsdp=fsdp, trainer={"experts": experts})
    check(tmp_path, answers, expected)


@pytest.mark.parametrize("world", [pytest.param(2, marks=fast)])
def test_calls_of_a_step_count_as_they_weigh(
    pool: Pool, known: Known, tmp_path: Path, world: int
) -> None:
    """1 and 3 of 4."""
    model, (_, first) = known(QWEN, EXPERTS)
    _, second = expect(model, EXPERTS, step=1)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    answers = pool.run("two_calls", world, **arguments, trainer={"experts": EXPERTS})
    for answer in answers:
        check_told(answer, {name: (first[name] + 3 * second[name]) / 4 for name in first})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"fsdp": {"activation_checkpointing": True}}, id="fsdp"),
        pytest.param({"layout": {"distributed_optimizer": False}}, id="megatron"),
    ],
)
def test_layers_that_stay_count_too(
    pool: Pool, ranks: Pool, known: Known, tmp_path: Path, layout: dict[str, Any]
) -> None:
    model, (_, values) = known(QWEN, EXPERTS)
    trainer = {"experts": EXPERTS, "trainable": {"allow": ["*.layers.3.*"]}}
    arguments = {"model": str(model.directory), "out": str(tmp_path), "trainer": trainer}
    (answer,) = (ranks if "layout" in layout else pool).run("gradients", 1, **arguments, **layout)
    check_told(answer, values)


@pytest.mark.parametrize("case", [QWEN, DEEPSEEK], ids=lambda case: case.name)
def test_shares_are_of_the_experts_that_rows_bring(
    pool: Pool, known: Known, tmp_path: Path, case: Case
) -> None:
    """Where routing is replayed; probabilities are the trainer's own."""
    model, own = known(case, EXPERTS)
    shape = shape_of(model)
    expected = expect(model, EXPERTS, with_experts(rows_of(0), shape))
    given: dict[str, Any] = {"model": str(model.directory), "out": str(tmp_path), "shape": shape}
    fsdp = {"routing_replay": "rollout", "expert": 2, "activation_checkpointing": True}
    answers = pool.run("gradients", 2, **given, fsdp=fsdp, trainer={"experts": EXPERTS})
    check(tmp_path, answers, expected)
    assert gradient_difference(own[0], expected[0]) > 100 * MAX_GRADIENT_DIFF


@pytest.mark.parametrize("world", [pytest.param(1, marks=fast), 2])
@pytest.mark.parametrize("case", [QWEN, DEEPSEEK], ids=lambda case: case.name)
def test_on_the_reference_backend(
    pool: Pool, known: Known, tmp_path: Path, case: Case, world: int
) -> None:
    model, expected = known(case, EXPERTS)
    arguments = {"model": str(model.directory), "out": str(tmp_path)}
    answers = pool.run("gradients_of_copies", world, **arguments, trainer={"experts": EXPERTS})
    check(tmp_path, answers, expected)


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.name)
def test_of_every_family(pool: Pool, known: Known, tmp_path: Path, case: Case) -> None:
    arguments = {"out": str(tmp_path), "trainer": {"experts": EXPERTS}}
    model, expected = known(case, EXPERTS)
    answers = pool.run("gradients", 1, **arguments, model=str(model.directory))
    check(tmp_path, answers, expected)


@fast
def test_a_family_whose_routers_are_not_known_is_refused_by_name(known: Known) -> None:
    plain: Any = known(QWEN, EXPERTS)[0].load()  # type: ignore[no-untyped-call]
    plain.config.model_type = "another"
    load = watch_experts(plain, torch.device("cpu"))
    refused = "experts.z_loss_coefficient is not for model_type another, of whose routers"
    with pytest.raises(UnknownRouterError, match=refused):
        watch_logits(ExpertsConfig(z_loss_coefficient=Z), plain, load)


ON_MEGATRON = [
    pytest.param(QWEN, 1, {}, EXPERTS, id="qwen-1"),
    pytest.param(QWEN, 1, {}, {"z_loss_coefficient": Z}, id="qwen-1-z"),
    pytest.param(QWEN, 2, {}, EXPERTS, id="qwen-DP2"),
    pytest.param(QWEN, 2, {"expert": 2}, EXPERTS, id="qwen-EP2", marks=fast),
    pytest.param(QWEN, 2, {"pipeline": 2}, EXPERTS, id="qwen-PP2", marks=fast),
    pytest.param(QWEN, 2, SCATTERED, EXPERTS, id="qwen-TP2+SP", marks=fast),
    pytest.param(QWEN, 2, {"context": 2}, EXPERTS, id="qwen-CP2", marks=fast),
    pytest.param(
        QWEN,
        2,
        {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
        EXPERTS,
        id="qwen-PP2xVPP2-recompute",
        marks=fast,
    ),
    pytest.param(
        QWEN,
        4,
        {**SCATTERED, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        EXPERTS,
        id="qwen-all",
    ),
    pytest.param(DEEPSEEK, 2, {"pipeline": 2}, EXPERTS, id="deepseek-PP2"),
    pytest.param(
        QWEN,
        2,
        {"pipeline": 2, "routing_replay": "recorded", "recompute": "full"},
        EXPERTS,
        id="qwen-PP2-replay",
    ),
    pytest.param(DEEPSEEK, 2, SCATTERED, EXPERTS, id="deepseek-TP2+SP"),
    pytest.param(SINKS, 1, {}, EXPERTS, id="gpt_oss-1"),
]


@pytest.mark.parametrize(("case", "world", "layout", "experts"), ON_MEGATRON)
def test_on_megatron(
    ranks: Pool,
    known: Known,
    tmp_path: Path,
    case: Case,
    world: int,
    layout: dict[str, Any],
    experts: dict[str, float],
) -> None:
    model, expected = known(case, experts)
    layout = {"distributed_optimizer": False, **layout}
    arguments = {"model": str(model.directory), "out": str(tmp_path), "layout": layout}
    answers = ranks.run("gradients", world, **arguments, trainer={"experts": experts})
    check(tmp_path, answers, expected)
