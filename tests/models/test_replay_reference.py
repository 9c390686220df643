"""The reference backend trains by experts that others chose, or that it recorded itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.trainer.backend import LayoutError, Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from services.trainer.errors import RoutingMissingError
from sluice.config import ConfigError, parse_config
from tests.contract.training_backend.cases import PPO, Model, Oracle, build_model
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.fsdp.oracle import as_stored_names, gradient_difference, logprob_difference
from tests.models.families import build
from tests.models.forced import ForcedOracle, shape_of, with_experts
from tests.models.proof import MAX_GRADIENT_DIFF, MAX_LOGPROB_DIFF
from tests.models.test_experts import named

fast = pytest.mark.fast
FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "minimax_m2",
    "qwen3_moe",
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def open_backend(model: Model, out: Path, **settings: Any) -> ReferenceBackend:
    values = {"model": str(model.directory), "store": str(out), "optim": OPTIM, "durable": False}
    config = parse_config(TrainerConfig, {**values, **settings})
    return ReferenceBackend(config, Mesh(rank=0, world_size=1))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=fast if n in ("gpt_oss", "qwen3_moe") else ()) for n in FAMILIES]
)
def test_experts_of_the_rows_train(tmp_path: Path, name: str) -> None:
    """Prompts that siblings share, and those of which each has experts of its own."""
    model = build(named(name), tmp_path / "model")
    rows = with_experts(rows_of(0), shape_of(model))
    (other,) = with_experts(
        [row for row in rows if row.sample_id == "b/1"], shape_of(model), seed=9
    )
    rows = [other if row.sample_id == "b/1" else row for row in rows]
    oracle = ForcedOracle(model.load())
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    oracle.ppo_loss(rows).backward()
    backend = open_backend(model, tmp_path, reference={"routing_replay": "rollout"})
    found = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    assert logprob_difference(found, wanted) <= MAX_LOGPROB_DIFF
    backend.forward_backward([rows[:5], [], rows[5:]], PPO)
    ours, plain = (
        as_stored_names(m, {n: p.grad for n, p in m.named_parameters() if p.grad is not None})
        for m in (backend._policy.model, oracle.model)
    )
    assert gradient_difference(ours, plain) <= MAX_GRADIENT_DIFF
    free = backend.compute_logprobs([rows], model="reference", temperature=1.0)
    assert logprob_difference(free, wanted) > 1e-2
    with pytest.raises(RoutingMissingError, match=r"'b/0' has no routed_experts; set engine\."):
        backend.compute_logprobs([rows_of(0)[3:]], model="policy", temperature=1.0)


@fast
def test_recorded_experts_outlive_the_weights(tmp_path: Path) -> None:
    model = build(named("qwen3_moe"), tmp_path / "model")
    backend, rows = (
        open_backend(model, tmp_path, reference={"routing_replay": "recorded"}),
        rows_of(0),
    )
    with pytest.raises(RoutingMissingError, match=r"compute its old log-probs first"):
        backend.forward_backward([rows], PPO)
    backend.compute_logprobs([rows], model="policy", temperature=1.0)
    backend.forward_backward([rows], PPO)
    backend.step(normalizer=NORMALIZER, learning_rate=0.05)
    replayed = backend.forward_backward([rows], PPO, keep_outputs=True).outputs
    plain = model.load()
    plain.load_state_dict(backend._policy.model.state_dict())
    oracle = ForcedOracle(plain)
    assert backend._replay is not None
    kept = backend._replay._records.rows
    told: list[Row] = [row._replace(routed_experts=kept[row.sample_id].experts) for row in rows]
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in told}
    assert logprob_difference(dict(replayed), wanted) <= MAX_LOGPROB_DIFF
    fresh = open_backend(model, tmp_path / "fresh")
    fresh._policy.model.load_state_dict(backend._policy.model.state_dict())
    free = fresh.compute_logprobs([rows], model="policy", temperature=1.0)
    assert logprob_difference(free, wanted) > 1e-2  # routers have changed their minds


@fast
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}])
def test_the_reference_chooses_for_itself(tmp_path: Path, lora: Any) -> None:
    """Of rows that bring no experts too; what it chooses is not recorded for the policy."""
    model = build(named("qwen3_moe"), tmp_path / "model")
    oracle, rows = Oracle(model.load()), rows_of(0)
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    for mode in ("rollout", "recorded"):
        settings = {"reference": {"routing_replay": mode}, "lora": lora}
        backend = open_backend(model, tmp_path / mode, **settings)
        for given in (rows, with_experts(rows, shape_of(model))):
            found = backend.compute_logprobs([given], model="reference", temperature=1.0)
            assert logprob_difference(found, wanted) <= MAX_LOGPROB_DIFF
        with pytest.raises(RoutingMissingError):
            backend.forward_backward([rows], PPO)


@fast
def test_adapters_train_by_the_experts_of_the_rows(tmp_path: Path) -> None:
    """Those that begin at zero have the log-probs of the base that is forced to them."""
    model = build(named("qwen3_moe"), tmp_path / "model")
    rows = with_experts(rows_of(0), shape_of(model))
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"]}
    backend = open_backend(model, tmp_path, reference={"routing_replay": "rollout"}, lora=lora)
    oracle = ForcedOracle(model.load())
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    gaps = []
    for _ in range(2):
        made = backend.forward_backward([rows], PPO, keep_outputs=True)
        gaps.append(logprob_difference(dict(made.outputs), wanted))
        backend.step(normalizer=NORMALIZER, learning_rate=0.1)
    assert gaps[0] <= MAX_LOGPROB_DIFF
    assert gaps[1] > 1e-4


@fast
def test_experts_of_narrow_products_are_taken_too(tmp_path: Path) -> None:
    """With autocast, to which other experts are further off than its rounding."""
    model = build(named("qwen3_moe"), tmp_path / "model")
    rows = with_experts(rows_of(0), shape_of(model))
    settings: dict[str, Any] = {"reference": {"routing_replay": "rollout"}, "autocast": True}
    found = open_backend(model, tmp_path, **settings).compute_logprobs(
        [rows], model="policy", temperature=1.0
    )
    oracle = ForcedOracle(model.load())
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    assert logprob_difference(found, wanted) < 0.2
    others = with_experts(rows_of(0), shape_of(model), seed=4)
    wrong = {row.sample_id: oracle.logprobs(row).detach() for row in others}
    assert logprob_difference(found, wrong) > 0.5


@fast
def test_what_has_nothing_to_replay_is_refused_by_name(tmp_path: Path) -> None:
    model, settings = build_model(tmp_path / "model", "qwen3"), {"routing_replay": "rollout"}
    with pytest.raises(LayoutError, match=r"reference.routing_replay: model_type qwen3 has no exp"):
        open_backend(model, tmp_path, reference=settings)
    with pytest.raises(ConfigError, match=r"reference has no effect with backend fsdp"):
        open_backend(model, tmp_path, reference=settings, backend="fsdp")


def test_routers_are_left_free_behind_a_pass_that_failed(tmp_path: Path) -> None:
    model = build(named("qwen3_moe"), tmp_path / "model")
    backend = open_backend(model, tmp_path, reference={"routing_replay": "rollout"})
    rows = with_experts(rows_of(0), shape_of(model))
    del rows[0].columns["advantages"]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="advantages"):
        backend.forward_backward([rows], PPO)
    assert backend._replay is not None
    assert all(router.told is None for router in backend._replay._routers._each)
    assert torch.is_grad_enabled()
