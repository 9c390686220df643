"""Losses and estimators by name over the wire: on one rank and on two, shipped and a user's own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.client import RemoteError, TrainerClient
from sluice.samples.sample import Sample
from tests import warm
from tests.service.trainer.harness import (
    ACTIVE,
    RunningTrainer,
    make_groups,
    running_trainer,
    until,
    upload,
)

OWN = "tests.service.trainer.own_algorithms"
SOFT = {"name": f"{OWN}:Soft", "settings": {"heat": 0.3}}
BATCH_NORMALIZED = [{"name": "tis", "settings": {"high": 1.1, "batch_normalized": True}}]


@pytest.fixture(scope="module")
def trainers(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[list[RunningTrainer]]:
    root = tmp_path_factory.mktemp("algorithms")
    with contextlib.ExitStack() as stack:
        running = []
        for count in (1, 2):
            # one of them without the libraries of its ranks
            with warm.cold() if count == 1 else contextlib.nullcontext():
                running.append(
                    stack.enter_context(
                        running_trainer(
                            root / str(count),
                            model,
                            ranks={"count": count},
                            user_modules=["tests.service"],
                        )
                    )
                )
        yield running


@pytest.fixture
async def clients(trainers: list[RunningTrainer]) -> AsyncIterator[list[TrainerClient]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(trainer.client()) for trainer in trainers]
        for client in found:
            await until(client, lambda now: now.state == ACTIVE)
        yield found
        for client in found:
            await client.discard_gradients()
            for batch in (await client.get()).batches:
                await client.delete_batch(batch)


def scored(samples: list[Sample]) -> list[Sample]:
    """With numbers that environments give."""
    return [
        replace(
            sample,
            columns={
                **sample.columns,
                "score/short": float(len(sample.token_ids)),
                "score/baseline": 0.3,
            },
        )
        for sample in samples
    ]


async def columns_of(
    client: TrainerClient, spec: AdvantageSpec
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Advantages by sample, and what is told of them."""
    samples = scored(make_groups("rows", count=5, seed=7))
    batch = (await client.upload_batch("estimated", len(samples), samples=samples)).batch
    told = (await client.compute_advantages(batch, spec)).metrics
    rows = await client.get_columns(batch, ["advantages"])
    await client.delete_batch(batch)
    advantages = {sample_id: row["advantages"].tolist() for sample_id, row in rows.items()}
    return advantages, dict(told)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "opo"},
        {"name": "remax"},
        {"name": "gpg"},
        {"name": "pass_at_k", "settings": {"k": 2, "threshold": 0.5}},
        {"name": "gdpo", "settings": {"rewards": {"reward": 1.0, "score/short": 0.5}}},
        {"name": "rloo", "overlong": {"max_length": 6, "buffer": 4}},
        {"name": f"{OWN}:Ranked", "settings": {"heat": 2.0}},
    ],
)
async def test_advantages_are_the_same_however_rows_are_spread(
    clients: list[TrainerClient], spec: dict[str, Any]
) -> None:
    found = [await columns_of(client, AdvantageSpec(**spec)) for client in clients]
    (one, told), (two, also_told) = found
    assert told == pytest.approx(also_told, abs=1e-5)
    assert ("best" in told) == spec["name"].endswith("Ranked")
    assert one.keys() == two.keys()
    assert any(value for values in one.values() for value in values)
    for sample_id, values in one.items():
        assert two[sample_id] == pytest.approx(values, abs=1e-5)


async def loss_of(client: TrainerClient, spec: LossSpec) -> tuple[float, float, dict[str, float]]:
    samples = make_groups("rows", count=5, seed=7)
    batch = await upload(client, "passed", samples)
    await client.compute_logprobs(batch)
    await client.compute_logprobs(batch, reference=True)
    step = (await client.get()).step
    passed = await client.forward_backward(batch, spec, expected_step=step, part_id="whole")
    stepped = await client.step_optimizer(step, ["whole"], learning_rate=0.0)
    await client.delete_batch(batch)
    return passed.loss, stepped.grad_norm, dict(passed.metrics)


@pytest.mark.parametrize(
    "spec",
    [
        SOFT,
        {"name": "gmpo"},
        {"name": "clip_cov", "clip_low": 0.2, "settings": {"low": 0.0, "share": 0.3}},
        {"name": "kl_cov", "settings": {"share": 0.3}},
        {"name": "sapo", "old_logprobs": "old", "corrections": BATCH_NORMALIZED},
        {
            "name": "dppo",
            "old_logprobs": "old",
            "corrections": [{"name": f"{OWN}:Cap", "settings": {"heat": 1.05}}],
            "kl_coefficient": 0.1,
            "kl_estimator": f"{OWN}:Absolute",
        },
    ],
)
async def test_a_pass_is_the_same_however_rows_are_spread(
    clients: list[TrainerClient], spec: dict[str, Any]
) -> None:
    one, two = [await loss_of(client, LossSpec(**spec)) for client in clients]
    assert one[0] == pytest.approx(two[0], rel=1e-4, abs=1e-6)
    assert one[1] == pytest.approx(two[1], rel=1e-4)
    assert one[1] > 0
    for name in ("clipped_covariance", "penalised_covariance", "importance_weight"):
        assert one[2].get(name, 0.0) == pytest.approx(two[2].get(name, 0.0), rel=1e-4)


async def test_a_batch_normalized_weight_has_the_mean_1(clients: list[TrainerClient]) -> None:
    spec = LossSpec(name="sapo", old_logprobs="old", corrections=BATCH_NORMALIZED)
    _, _, metrics = await loss_of(clients[1], spec)
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)


async def refused(clients: list[TrainerClient], spec: Any) -> RemoteError:
    batch = await upload(clients[1], "refused", make_groups("refused", count=2))
    step = (await clients[1].get()).step
    with pytest.raises(RemoteError) as caught:
        if isinstance(spec, AdvantageSpec):
            await clients[1].compute_advantages(batch, spec)
        else:
            await clients[1].forward_backward(batch, spec, expected_step=step, part_id="p")
    await clients[1].delete_batch(batch)
    assert not (await clients[1].get()).gradients_incomplete
    return caught.value


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        (LossSpec(name=f"{OWN}:Soft"), "loss.settings.heat", "is required"),
        (LossSpec(name=f"{OWN}:Soft", settings={"heat": 0}), "loss.settings.heat", "greater"),
        (LossSpec(name=f"{OWN}:Soft", settings={"heat": 1, "hot": 1}), "loss.settings.hot", "heat"),
        (LossSpec(name=f"{OWN}:Soft", settings={"heat": 1e39}), "loss.settings.heat", "1e+30"),
        (LossSpec(name=f"{OWN}:Absent"), "loss.name", "names no subclass"),
        (LossSpec(name=f"{OWN}:Ranked"), "loss.name", "names no subclass"),
        (LossSpec(name="tests.service.no_module:X"), "loss.name", "No module"),
        (LossSpec(name="os:abort"), "loss.name", r"user_modules\): tests.service"),
        (
            LossSpec(name="gpg", kl_coefficient=1, kl_estimator="subprocess:run"),
            "loss.kl_estimator",
            "user_modules",
        ),
        (LossSpec(name="gpg", corrections=[{"name": "os:system"}]), "loss.corrections.0.name", ""),
        (AdvantageSpec(name="os:abort"), "advantage.name", "user_modules"),
        (AdvantageSpec(name=f"{OWN}:Ranked"), "advantage.settings.heat", "is required"),
        (
            AdvantageSpec(name="pass_at_k", settings={"k": 9}),
            "advantage.settings.k",
            "is 9, above the 4 answers",
        ),
    ],
)
async def test_what_is_wrong_is_refused_by_the_field_that_has_it(
    clients: list[TrainerClient], spec: Any, field: str, message: str
) -> None:
    error = await refused(clients, spec)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), error
    assert error.metadata["field"] == field
    assert message.partition("\\")[0] in str(error)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "rloo", "overlong": {"max_length": 1, "buffer": 1, "penalty": 1e30}}, "-2e+30"),
        ({"name": "distillation"}, "an advantage of 6e+38, no float32, at response token 0"),
    ],
)
async def test_what_comes_to_no_number_is_no_advantage(
    clients: list[TrainerClient], spec: dict[str, Any], message: str
) -> None:
    groups = make_groups("far", count=3)
    samples = [with_far_numbers(row) if row.group_id == "far-1" else row for row in groups]
    samples = [with_teacher(row) for row in samples]
    for client in clients:
        batch = await upload(client, "far", samples)
        with pytest.raises(RemoteError) as caught:
            await client.compute_advantages(batch, AdvantageSpec(**spec))
        assert (caught.value.reason, caught.value.metadata["field"]) == (
            "INVALID_FIELD",
            "advantage",
        )
        assert caught.value.metadata["sample_id"].startswith("far-1/")
        assert message in str(caught.value)
        await client.delete_batch(batch)


def with_far_numbers(sample: Sample) -> Sample:
    """At the ends of what columns take."""
    far = np.full(sample.response_length, -3e38, dtype=np.float32)
    return replace(sample, columns={**sample.columns, "reward": -1e30, "rollout_logprobs": far})


def with_teacher(sample: Sample) -> Sample:
    near = -sample.columns["rollout_logprobs"]
    return replace(sample, columns={**sample.columns, "teacher_logprobs": near})


async def test_a_column_that_a_users_loss_reads_is_missed_by_name(
    clients: list[TrainerClient],
) -> None:
    error = await refused(clients, LossSpec(**SOFT))
    assert error.reason == "COLUMN_MISSING"
    assert error.metadata["columns"] == "reference_logprobs"


async def test_the_trainer_tells_what_an_algorithm_reads(clients: list[TrainerClient]) -> None:
    described = await clients[1].describe_algorithm(
        LossSpec(**SOFT), AdvantageSpec(name="remax", kl_coefficient=0.1)
    )
    assert set(described.loss_columns) == {"advantages", "reference_logprobs", "rollout_logprobs"}
    assert set(described.advantage_columns) == {
        "reward",
        "score/baseline",
        "reference_logprobs",
        "rollout_logprobs",
    }
    trainer = await clients[1].get()
    assert {"sapo", "gmpo", "dppo", "clip_cov", "kl_cov", "cross_entropy"} <= {*trainer.losses}
    assert "gdpo" in trainer.advantage_estimators
    assert "icepop" in trainer.corrections
    assert list(trainer.user_modules) == ["tests.service"]


def loads_torch(process_id: int) -> bool:
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


async def test_the_controller_has_no_torch(
    clients: list[TrainerClient], trainers: list[RunningTrainer]
) -> None:
    await clients[0].describe_algorithm(LossSpec(**SOFT), AdvantageSpec(name="grpo"))
    rank = (await clients[0].get()).ranks[0].process_id
    assert loads_torch(rank)
    assert not loads_torch(trainers[0].process.pid)


async def test_a_loss_that_raises_is_told_with_its_line(clients: list[TrainerClient]) -> None:
    batch = await upload(clients[1], "raises", make_groups("raises", count=2))
    step = (await clients[1].get()).step
    where = r"no attribute 'ratios', at \S+own_algorithms.py:\d+ in token_losses"
    with pytest.raises(RemoteError, match=where):
        await clients[1].forward_backward(
            batch, LossSpec(name=f"{OWN}:Misspelt"), expected_step=step, part_id="p"
        )
    await clients[1].discard_gradients()


async def test_a_loss_that_answers_nonsense_leaves_the_trainer_fit(
    clients: list[TrainerClient],
) -> None:
    batch = await upload(clients[1], "nonsense", make_groups("nonsense", count=2))
    step = (await clients[1].get()).step
    with pytest.raises(RemoteError, match="answered with shape"):
        await clients[1].forward_backward(
            batch, LossSpec(name=f"{OWN}:Wrong"), expected_step=step, part_id="p"
        )
    await clients[1].discard_gradients()
    passed = await clients[1].forward_backward(
        batch, LossSpec(name="gpg"), expected_step=step, part_id="p"
    )
    assert passed.token_count > 0
