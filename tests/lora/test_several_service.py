"""Several adapters of one trainer behind its API: apart, whatever dies or is wrong."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.trainer.controller.checkpoint_record import CheckpointRecord
from services.trainer.controller.checkpoints import check_adapter_files
from services.trainer.errors import CheckpointMismatchError
from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, typed_errors
from sluice.weights.adapter import ADAPTER_CONFIG, AdapterSpec, encode_adapter_config
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tests.service.trainer.harness import (
    ACTIVE,
    GRPO,
    PPO,
    RESTART_SECONDS,
    RunningTrainer,
    end,
    make_groups,
    poll,
    running_trainer,
    until,
)

fast = pytest.mark.fast
LORA = {"rank": 4, "alpha": 8, "max_adapters": 3}
REFERENCE = {"lora": LORA, "keep_versions": 1}
TWO_RANKS = {
    "ranks": {
        "count": 2,
        "heartbeat_seconds": 0.2,
        "silent_seconds": 1,
        "restart_backoff": RESTART_SECONDS / 4,
    },
    "lora": LORA,
}
FSDP = {**TWO_RANKS, "backend": "fsdp", "fsdp": {"dtype": "float32"}}
MEGATRON = {
    **TWO_RANKS,
    "backend": "megatron",
    "megatron": {"dtype": "float32", "tensor": 2, "sequence_parallel": True},
}
Digests = list[str]


@dataclass
class Line:
    """An adapter, or the policy of the settings, that steps over batches of its own."""

    client: TrainerClient
    adapter: str
    seed: int
    step: int = 0

    async def upload(self, batch_id: str) -> str:
        samples = make_groups(f"{self.adapter}-{batch_id}", seed=self.seed)
        answer = await self.client.upload_batch(
            f"{self.adapter}-{batch_id}", len(samples), samples=samples, adapter=self.adapter
        )
        await self.client.compute_advantages(answer.batch, GRPO)
        return str(answer.batch)

    async def gather(self, batch: str, part_id: str = "whole") -> float:
        passed = await self.client.forward_backward(
            batch, PPO, expected_step=self.step, part_id=part_id, adapter=self.adapter
        )
        return passed.loss

    async def apply(self, *part_ids: str) -> None:
        parts = part_ids or ("whole",)
        done = await self.client.step_optimizer(self.step, parts, adapter=self.adapter)
        self.step = done.step

    async def train(self, batch: str) -> None:
        await self.gather(batch)
        await self.apply()

    async def digest(self) -> str:
        return (await self.client.publish_weights(adapter=self.adapter)).weights.digest

    async def save(self, checkpoint_id: str) -> None:
        await self.client.save_checkpoint(checkpoint_id, adapter=self.adapter)

    async def stands(self) -> pb.TrainedAdapter:
        told = {each.adapter: each for each in (await self.client.get()).adapters}
        return told[self.adapter]


async def refusal(call: Awaitable[Any]) -> RemoteError:
    with pytest.raises(RemoteError) as refused, typed_errors():
        await call
    return refused.value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Any:
    with running_trainer(tmp_path_factory.mktemp("trainer"), model, **REFERENCE) as running:
        yield running


@pytest.fixture
async def client(trainer: RunningTrainer) -> AsyncIterator[TrainerClient]:
    """Of a trainer without adapters by name."""
    async with trainer.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        for each in (await client.get()).adapters:
            await client.delete_adapter(each.adapter)
        yield client


async def alone(
    root: Path, model: Path, settings: dict[str, Any], seed: int, count: int
) -> Digests:
    """What a trainer of one adapter publishes after each of `count` steps."""
    with running_trainer(root, model, **settings) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            line, digests = Line(client, "", seed), []
            batch = await line.upload("rows")
            for _ in range(count):
                await line.train(batch)
                digests.append(await line.digest())
            return digests


WRONG = ["../alice", "a/b", "a\0b", "a@3", "base", "policy", ".hidden", "x" * 5000, "é", " "]


@fast
@pytest.mark.parametrize("name", WRONG)
async def test_a_name_that_is_none_is_refused(client: TrainerClient, name: str) -> None:
    refused = await refusal(client.create_adapter(name))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.metadata["field"] == "adapter"
    assert not (await client.get()).adapters


@fast
async def test_an_empty_name_is_no_adapter(client: TrainerClient) -> None:
    for call in (client.create_adapter(""), client.delete_adapter("")):
        assert (await refusal(call)).code == grpc.StatusCode.INVALID_ARGUMENT


UNKNOWN = [("nobody", "NOT_FOUND"), ("../alice", "NOT_FOUND"), ("x" * 200, "NOT_FOUND")]
UNKNOWN += [("x\0", "INVALID_ARGUMENT"), ("x" * 5000, "INVALID_ARGUMENT")]


@fast
@pytest.mark.parametrize(("name", "code"), UNKNOWN)
async def test_calls_about_an_unknown_adapter_are_not_found(
    client: TrainerClient, name: str, code: str
) -> None:
    samples = make_groups("unknown")
    calls: list[Awaitable[Any]] = [
        client.upload_batch("unknown", len(samples), samples=samples, adapter=name),
        client.compute_logprobs("batches/unknown", adapter=name),
        client.forward_backward("batches/unknown", PPO, expected_step=0, part_id="p", adapter=name),
        client.step_optimizer(0, ["p"], adapter=name),
        client.discard_gradients(adapter=name),
        client.save_checkpoint("unknown", adapter=name),
        client.load_checkpoint("checkpoints/unknown", adapter=name),
        client.publish_weights(adapter=name),
        client.delete_adapter(name),
    ]
    for call in calls:
        refused = await refusal(call)
        assert refused.code.name == code
        if code == "NOT_FOUND":
            assert refused.reason == "ADAPTER_NOT_FOUND"
            assert name[:64] in refused.metadata["name"]
        else:
            assert refused.metadata["field"].endswith("adapter")


@fast
@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -1}, "rank"),
        ({"rank": 1 << 30}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"alpha": 1e7}, "alpha"),
        ({"targets": ["q_proj", "q_proj"]}, "targets"),
        ({"targets": ["../q_proj"]}, "targets"),
        ({"targets": ["q" * 5000]}, "targets"),
        ({"targets": ["q_prj"]}, "targets"),  # which only ranks know
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"learning_rate": 1e6}, "learning_rate"),
    ],
)
async def test_numbers_that_are_none_are_refused(
    client: TrainerClient, values: dict[str, Any], field: str
) -> None:
    refused = await refusal(client.create_adapter("alice", **values))
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.metadata["field"] == field
    assert not (await client.get()).adapters
    assert (await client.create_adapter("alice")).rank == 4  # and nothing of it is left


@fast
async def test_what_is_not_given_is_the_trainers(client: TrainerClient) -> None:
    made = await client.create_adapter("alice")
    assert (made.rank, made.alpha, made.learning_rate) == (4, 8.0, 0.01)
    made = await client.create_adapter("bob", rank=2, targets=["v_proj"], learning_rate=0.5)
    assert (made.rank, made.alpha, list(made.targets)) == (2, 2.0, ["v_proj"])
    line = Line(client, "bob", 1)
    batch = await line.upload("rate")
    await line.gather(batch)
    assert (await client.step_optimizer(0, ["whole"], adapter="bob")).learning_rate == 0.5


@fast
async def test_there_are_so_many_and_a_request_counts_once(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    request = pb.CreateAdapterRequest(adapter="alice", request_id="once")
    with typed_errors():
        first = await client.stub.CreateAdapter(request)
        assert await client.stub.CreateAdapter(request) == first
    other = pb.CreateAdapterRequest(adapter="alice", rank=2, request_id="once")
    assert (await refusal(client.stub.CreateAdapter(other))).reason == "REQUEST_ID_REUSED"
    again = await refusal(client.create_adapter("alice"))
    assert (again.code, again.reason) == (grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")
    await client.create_adapter("bob")
    await client.create_adapter("carol")
    full = await refusal(client.create_adapter("dave"))
    assert (full.code, full.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ADAPTER_LIMIT")
    assert full.metadata["limit"] == "3"
    await client.delete_adapter("bob")
    await client.create_adapter("dave")
    assert [each.adapter for each in (await client.get()).adapters] == ["alice", "carol", "dave"]


@fast
async def test_parts_steps_and_batches_of_two_never_mix(client: TrainerClient) -> None:
    await client.create_adapter("alice")
    await client.create_adapter("bob")
    alice, bob = Line(client, "alice", 1), Line(client, "bob", 2)
    own = Line(client, "", 3, step=(await client.get()).step)
    of_alice, of_bob, rest = await alice.upload("b"), await bob.upload("b"), await own.upload("b")

    for batch, adapter in ((of_alice, "bob"), (of_alice, ""), (rest, "bob")):
        passing = client.forward_backward(
            batch, PPO, expected_step=0, part_id="stray", adapter=adapter
        )
        scoring = client.compute_logprobs(batch, adapter=adapter)
        for call in (passing, scoring):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "ADAPTER_MISMATCH",
            )
    loss = await alice.gather(of_alice, "same")
    assert await bob.gather(of_bob, "same") != loss
    assert await alice.gather(of_alice, "same") == loss  # the part is there already
    await bob.gather(of_bob, "more")
    assert list((await alice.stands()).part_ids) == ["same"]
    assert list((await bob.stands()).part_ids) == ["same", "more"]
    assert not (await client.get()).part_ids
    assert (await refusal(bob.apply("same"))).reason == "PARTS_MISMATCH"
    assert (await refusal(own.apply("same"))).reason == "NO_GRADIENTS"
    await alice.apply("same")
    assert await client.discard_gradients(adapter="bob") == ["same", "more"]
    assert ((await alice.stands()).step, (await bob.stands()).step) == (1, 0)
    stale = client.step_optimizer(0, ["same"], adapter="alice")
    assert (await refusal(stale)).reason == "STEP_MISMATCH"
    await client.delete_adapter("alice")
    told = await client.get()
    assert of_alice not in told.batches  # its rows go with it, those of others stay
    assert {of_bob, rest} <= {*told.batches}
    for batch in (of_bob, rest):
        await client.delete_batch(batch)


@fast
async def test_a_deleted_adapter_comes_back_as_a_new_one(client: TrainerClient) -> None:
    await client.create_adapter("alice")
    alice = Line(client, "alice", 1)
    fresh = await alice.digest()
    await alice.train(await alice.upload("gone"))
    assert await alice.digest() != fresh
    await client.delete_adapter("alice")
    await client.create_adapter("alice")
    assert (await alice.stands()).step == 0
    assert await Line(client, "alice", 1).digest() == fresh


@fast
async def test_every_line_of_versions_is_kept_by_itself(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    await client.create_adapter("alice")
    await client.create_adapter("bob")
    alice = (await client.publish_weights(adapter="alice")).weights
    own = (await client.publish_weights()).weights
    for _ in range(3):
        bob = (await client.publish_weights(adapter="bob")).weights
    assert (alice.adapter, bob.adapter, own.adapter) == ("alice", "bob", "")
    store = WeightStore(trainer.store / "weights", durable=False)

    wanted = {alice.version: "alice", own.version: "", bob.version: "bob"}

    async def is_trimmed() -> bool:
        found = {record.version: record.line for record in store.list()}
        return {v: line for v, line in found.items() if line in wanted.values()} == wanted

    await poll(is_trimmed)
    assert store.get(bob.version).parent == bob.version - 1
    assert (await client.get()).weights == own
    assert (await Line(client, "bob", 0).stands()).weights == bob


@fast
async def test_a_load_that_is_refused_costs_nobody_a_step(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    await client.create_adapter("alice")
    await client.create_adapter("bob")
    alice, bob = Line(client, "alice", 1), Line(client, "bob", 2)
    await alice.save("alice-0")
    await client.save_checkpoint("own-0")
    await bob.train(await bob.upload("unsaved"))
    before, restarts = await bob.digest(), (await client.get()).restart_count

    foreign = await refusal(client.load_checkpoint("checkpoints/alice-0", adapter="bob"))
    assert foreign.reason == "CHECKPOINT_MISMATCH"
    assert "is of adapter 'alice', not of adapter 'bob'" in str(foreign)
    for adapter, name in (("", "alice-0"), ("alice", "own-0")):
        refused = await refusal(client.load_checkpoint(f"checkpoints/{name}", adapter=adapter))
        assert refused.reason == "CHECKPOINT_MISMATCH"

    await client.delete_adapter("alice")
    await client.create_adapter("alice", rank=2)
    other_rank = await refusal(client.load_checkpoint("checkpoints/alice-0", adapter="alice"))
    assert other_rank.reason == "CHECKPOINT_MISMATCH"
    assert "rank was 4, and is 2" in str(other_rank)

    await client.delete_adapter("alice")
    await client.create_adapter("alice")
    path = trainer.store / "checkpoints" / "alice-0" / "policy.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 4
    for data in (bytes(flipped), whole[:-9], b""):
        path.write_bytes(data)
        damaged = await refusal(client.load_checkpoint("checkpoints/alice-0", adapter="alice"))
        assert (damaged.code, damaged.reason) == (
            grpc.StatusCode.DATA_LOSS,
            "CHECKPOINT_DAMAGED",
        )
        assert damaged.metadata["file"] == "policy.safetensors"
    path.write_bytes(whole)
    await client.load_checkpoint("checkpoints/alice-0", adapter="alice")
    assert (await client.get()).restart_count == restarts
    assert ((await bob.stands()).step, await bob.digest()) == (1, before)


@fast
async def test_a_trainer_of_a_model_has_no_adapters(tmp_path: Path, model: Path) -> None:
    with running_trainer(tmp_path, model) as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            refused = await refusal(client.create_adapter("alice"))
            assert (refused.code, refused.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "ADAPTERS_UNSUPPORTED",
            )


@fast
@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        ({"base_digest": "f" * 32}, "base_digest was ffff"),
        ({"rank": 8}, "rank was 8, and is 4"),
        ({"alpha": 1.0}, "alpha was 1.0, and is 8.0"),
        ({"targets": ("q_proj",)}, "targets was ('q_proj',)"),
        (None, "is of no adapters"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_ahead_of_the_ranks(
    tmp_path: Path, saved: dict[str, Any] | None, reason: str
) -> None:
    spec = AdapterSpec(rank=4, alpha=8.0, targets=("o_proj",), base_digest="0" * 32)
    if saved is not None:
        path = tmp_path / ADAPTER_CONFIG
        path.write_bytes(encode_adapter_config(replace(spec, **saved)))
    record = CheckpointRecord(
        backend="fsdp", step=1, skipped_count=0, weights=None, layout={}, files={}, adapter="alice"
    )
    with pytest.raises(CheckpointMismatchError) as refused:
        check_adapter_files(tmp_path, "c", record, spec)
    assert reason in str(refused.value)


async def lose(client: TrainerClient, how: str) -> None:
    """The last rank dies, or the first hangs while a pass waits for it and is then killed."""
    told = await client.get()
    ranks = {rank.rank: rank.process_id for rank in told.ranks}
    if how == "killed":
        end(ranks[1], signal.SIGKILL)
    else:
        end(ranks[0], signal.SIGSTOP)

        async def is_silent() -> bool:
            return any("heartbeat of rank 0" in wait.what for wait in await client.list_waits())

        await poll(is_silent)
        end(ranks[0], signal.SIGKILL)
    await until(
        client,
        lambda now: now.state == ACTIVE and now.restart_count == told.restart_count + 1,
    )


@pytest.mark.parametrize("settings", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
async def test_each_recovers_to_its_own_checkpoint_and_goes_on_to_the_bit(
    tmp_path: Path, model: Path, settings: dict[str, Any]
) -> None:
    """Ranks die between steps of two, while one is saved, loaded and published; so does the
    controller."""
    expected = {
        "": await alone(tmp_path / "own", model, settings, 3, 3),
        "alice": await alone(tmp_path / "alice", model, settings, 1, 3),
        "bob": await alone(tmp_path / "bob", model, settings, 2, 3),
    }
    with running_trainer(tmp_path / "several", model, **settings) as running:
        folder = running.store.parent / "faults"
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            await client.create_adapter("alice")
            await client.create_adapter("bob")
            lines = [Line(client, "", 3), Line(client, "alice", 1), Line(client, "bob", 2)]
            own, alice, bob = lines
            rows = {line.adapter: await line.upload("rows") for line in lines}
            for line in lines:
                await line.gather(rows[line.adapter])
            for line in lines:
                await line.apply()
                assert await line.digest() == expected[line.adapter][0]
            await own.save("own-1")
            await alice.save("alice-1")
            await bob.train(rows["bob"])
            await bob.save("bob-2")
            await alice.train(rows["alice"])

            await lose(client, "killed")  # alice goes back a step, the others none
            assert ((await alice.stands()).step, (await bob.stands()).step) == (1, 2)
            assert (await client.get()).step == 1
            alice.step = 1
            for line, index in ((own, 0), (alice, 0), (bob, 1)):
                assert await line.digest() == expected[line.adapter][index]
                await client.compute_advantages(rows[line.adapter], GRPO)
            await alice.gather(rows["alice"])
            await lose(client, "stopped")  # with gradients of one gathered
            assert not (await alice.stands()).part_ids
            for line in lines:
                await client.compute_advantages(rows[line.adapter], GRPO)

            for point, lost in (
                ("rank0.save", alice.save("lost")),
                ("rank1.publish", alice.digest()),
                ("rank1.load", client.load_checkpoint("checkpoints/alice-1", adapter="alice")),
            ):
                restarts = (await client.get()).restart_count
                faults.arm(folder, point)
                assert (await refusal(lost)).reason == "RANK_LOST"
                await until(
                    client,
                    lambda now, n=restarts: now.state == ACTIVE and now.restart_count == n + 1,  # type: ignore[misc]
                )
                await bob.train(await bob.upload(point))  # progress, or the third is the last
                bob.step = (await client.load_checkpoint("checkpoints/bob-2", adapter="bob")).step
            rows["bob"] = await bob.upload("again")
            rows["alice"] = await alice.upload("again")
            await client.compute_advantages(rows[""], GRPO)
            for line in lines:
                while line.step < 3:
                    await line.train(rows[line.adapter])
                assert await line.digest() == expected[line.adapter][2]
            end(running.process.pid, signal.SIGKILL)
        await asyncio.to_thread(running.process.wait, PATIENCE)
    with running_trainer(tmp_path / "anew", model, **settings, store=str(running.store)) as anew:
        async with anew.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            assert not (await client.get()).adapters
            for adapter, seed, step in (("bob", 2, 2), ("alice", 1, 1)):
                await client.create_adapter(adapter)
                line = Line(client, adapter, seed)
                name = f"checkpoints/{adapter}-{step}"
                line.step = (await client.load_checkpoint(name, adapter=adapter)).step
                assert line.step == step
                batch = await line.upload("rows")
                while line.step < 3:
                    await line.train(batch)
                assert await line.digest() == expected[adapter][2]


@fast
async def test_sums_of_many_calls_are_divided_by_nothing(client: TrainerClient) -> None:
    total = PPO.model_copy(update={"aggregation": "sum"})
    norms = []
    for name, parts in (("whole", (slice(None),)), ("halves", (slice(0, 2), slice(2, None)))):
        await client.create_adapter(name)
        line = Line(client, name, seed=5)
        batch = await line.upload("rows")
        ids = [s.sample_id for s in make_groups(f"{name}-rows", seed=5)]
        for index, part in enumerate(parts):
            await client.forward_backward(
                batch,
                total,
                expected_step=0,
                part_id=str(index),
                sample_ids=ids[part],
                adapter=name,
            )
        stepped = await client.step_optimizer(0, [str(i) for i in range(len(parts))], adapter=name)
        norms.append(stepped.grad_norm)
        await client.delete_adapter(name)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    await client.create_adapter("mean")
    line = Line(client, "mean", seed=5)
    samples = make_groups("mean-rows", seed=5)
    await line.gather(await line.upload("rows"))
    mean = await client.step_optimizer(0, ["whole"], adapter="mean")
    tokens = sum(
        int(np.sum(s.columns.get("loss_mask", np.ones(s.response_length)))) for s in samples
    )
    assert norms[0] == pytest.approx(mean.grad_norm * tokens, rel=1e-5)


@fast
async def test_a_step_has_numbers_of_its_own(client: TrainerClient) -> None:
    async def digest(name: str, *given: pb.AdamSettings | None) -> str:
        await client.create_adapter(name)
        line = Line(client, name, seed=7)
        batch = await line.upload("rows")
        for adam in given:
            await line.gather(batch)
            done = await client.step_optimizer(line.step, ["whole"], adapter=name, adam=adam)
            line.step = done.step
        found = await line.digest()
        await client.delete_adapter(name)
        return found

    as_settings = pb.AdamSettings(beta1=0.9, beta2=0.95, epsilon=1e-8, max_grad_norm=1.0)
    plain = await digest("plain", None, None)
    assert await digest("same", as_settings, as_settings) == plain
    for other in (
        pb.AdamSettings(beta1=0.5),
        pb.AdamSettings(beta2=0.5),
        pb.AdamSettings(epsilon=1e-2),
        pb.AdamSettings(weight_decay=0.5),
        pb.AdamSettings(max_grad_norm=1e-3),
    ):
        assert await digest("other", None, other) != plain
    await client.create_adapter("wrong")
    for wrong, field in (
        (pb.AdamSettings(beta1=1.0), "adam.betas.0"),
        (pb.AdamSettings(epsilon=0.0), "adam.epsilon"),
        (pb.AdamSettings(weight_decay=-1.0), "adam.weight_decay"),
        (pb.AdamSettings(max_grad_norm=float("nan")), "adam.max_grad_norm"),
    ):
        refused = await refusal(client.step_optimizer(0, ["a"], adapter="wrong", adam=wrong))
        assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", field)


@fast
async def test_a_seed_draws_an_adapter(client: TrainerClient) -> None:
    found = []
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        await client.create_adapter(name, seed=seed)
        found.append(await Line(client, name, 0).digest())
        await client.delete_adapter(name)
    assert found[0] == found[1] != found[2]


@fast
async def test_one_goes_on_from_the_checkpoint_of_another(client: TrainerClient) -> None:
    await client.create_adapter("source", seed=3)
    source = Line(client, "source", seed=1)
    for number in range(2):
        await source.train(await source.upload(f"rows-{number}"))
    await source.save("of-source")
    saved = await source.digest()
    await client.create_adapter("heir")
    refused = await refusal(client.load_checkpoint("checkpoints/of-source", adapter="heir"))
    assert refused.reason == "CHECKPOINT_MISMATCH"
    loads = {"saved_adapter": "source", "adapter": "heir"}
    assert (await client.load_checkpoint("checkpoints/of-source", **loads)).step == 2
    heir = Line(client, "heir", seed=1, step=2)
    assert await heir.digest() == saved
    rows = make_groups("same", seed=4)

    async def after(line: Line) -> str:
        batch = await client.upload_batch(
            f"more-{line.adapter}", len(rows), samples=rows, adapter=line.adapter
        )
        await client.compute_advantages(batch.batch, GRPO)
        await line.train(batch.batch)
        await client.delete_batch(batch.batch)
        return await line.digest()

    whole = await after(source)
    assert await after(heir) == whole
    loaded = await client.load_checkpoint("checkpoints/of-source", weights_only=True, **loads)
    assert loaded.step == 0
    heir.step = 0
    assert await heir.digest() == saved
    assert await after(heir) != whole  # its moments are new
    assert not (await heir.stands()).checkpoint
    for alone in ({"saved_adapter": "source"}, {"weights_only": True}):
        refused = await refusal(client.load_checkpoint("checkpoints/of-source", **alone))
        assert refused.metadata["field"] in alone
