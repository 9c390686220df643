"""What the loop says of a trainer that it waits for, and makes of one that it lost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from sluice.client import RemoteError, TrainerClient
from sluice.config import ConfigError, parse_config
from sluice.loop.config import AlgorithmConfig, CriticConfig
from sluice.loop.journal import read_journal
from sluice.loop.ledger import LedgerGroup
from sluice.loop.report import RunReport
from sluice.loop.training import (
    TRAINER_LOSSES,
    CheckpointLostError,
    Critic,
    SavingCheckpoint,
    TrainerBrokenError,
    TrainerLostError,
    TrainerRecovery,
    active_trainer,
    check_lengths,
    describe_trainer,
    is_checkpoint_lost,
    lost_blob,
    mini_batches,
    why_not_active,
)
from sluice.runtime.channel import DEADLINES
from sluice.runtime.errors import text_of
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from sluice.runtime.wire import timestamp_of
from sluice.samples.blobs import BlobReference
from tests.patience import PATIENCE


def test_a_trainer_that_loads_is_told_with_its_ranks_and_what_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    trainer = pb.Trainer(state=pb.Trainer.STATE_LOADING)
    assert why_not_active(trainer) == "STATE_LOADING; no rank has reported yet"
    for rank, (activity, age) in enumerate([("loading", 3), ("", 200)]):
        heartbeat = timestamp_of(time.time() - age)
        trainer.ranks.add(rank=rank, activity=activity, heartbeat_time=heartbeat)
    loading = "rank 0 in loading, heard of 3 s ago; rank 1 in idle, heard of 200 s ago"
    assert why_not_active(trainer) == f"STATE_LOADING; {loading}"
    trainer.restart_count, trainer.failure = 2, "rank 1 was killed by SIGKILL"
    lost = "its ranks were lost 2 times: rank 1 was killed by SIGKILL"
    assert why_not_active(trainer) == f"STATE_LOADING; {lost}; {loading}"


def test_a_rank_whose_clock_is_ahead_was_not_heard_of_in_the_future() -> None:
    trainer = pb.Trainer(state=pb.Trainer.STATE_LOADING)
    trainer.ranks.add(rank=0, activity="loading", heartbeat_time=timestamp_of(time.time() + 60))
    assert why_not_active(trainer).endswith("rank 0 in loading, heard of 0 s ago")


def test_samples_are_no_longer_than_a_trainer_takes_them() -> None:
    assert check_lengths("trainer", pb.Trainer(max_row_tokens=16), longest=16, response=16) == ""
    assert check_lengths("trainer", pb.Trainer(), longest=1 << 20, response=1 << 20) == ""
    noted = check_lengths("critic", pb.Trainer(max_row_tokens=15), longest=16, response=14)
    assert noted.startswith("the critic takes 15 tokens of a sample at most, and engines go to 16")
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens: 15, and the critic takes 15"):
        check_lengths("critic", pb.Trainer(max_row_tokens=15), longest=16, response=15)


def shares(epochs: int, lot: str = "0/step-0", group_count: int = 7, count: int = 3) -> list:
    """The positions of the groups of each optimizer step, by epoch."""
    groups = [
        LedgerGroup(position=number, group_id=f"g{number}", state="generated", issue_step=0)
        for number in range(group_count)
    ]
    algorithm = AlgorithmConfig(mini_batches=count, epochs=epochs)
    steps = [[group.position for group in share] for share in mini_batches(groups, algorithm, lot)]
    assert len(steps) == epochs * count
    return [steps[i : i + count] for i in range(0, len(steps), count)]


def test_each_epoch_has_every_group_once_in_mini_batches_of_its_own() -> None:
    first, *others = shares(epochs=16)
    assert first == [[0, 1], [2, 3], [4, 5, 6]]  # as they come
    for epoch in others:
        assert sorted(number for share in epoch for number in share) == list(range(7))
        assert [len(share) for share in epoch] == [2, 2, 3]
    sets = {tuple(frozenset(share) for share in epoch) for epoch in others}
    assert len(sets) > 10


def test_epochs_are_drawn_again_for_each_step_and_alike_in_each_run() -> None:
    assert shares(epochs=3) == shares(epochs=3)
    assert shares(epochs=4)[:3] == shares(epochs=3)
    for lot in ("0/step-1", "1/step-0"):
        assert shares(epochs=3, lot=lot)[0] == shares(epochs=3)[0]
        assert shares(epochs=3, lot=lot)[1:] != shares(epochs=3)[1:]
    assert all(len(epoch) == 1 for epoch in shares(epochs=3, count=1))


class Trainer(pb_grpc.TrainerServiceServicer):
    """Answers with one state after the other, and with the last of them again."""

    def __init__(self) -> None:
        self.answers = [pb.Trainer(state=pb.Trainer.STATE_ACTIVE)]
        self.late = 0  # so many calls are answered too late

    async def GetTrainer(self, request, context):
        if self.late:
            self.late -= 1
            await asyncio.sleep(PATIENCE)  # until the caller's deadline
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return pb.GetTrainerResponse(trainer=answer)


@pytest.fixture
async def trainer() -> AsyncIterator[tuple[Trainer, TrainerClient]]:
    server, servicer = Server(ServerConfig(drain_seconds=0.1)), Trainer()
    server.add(pb_grpc.add_TrainerServiceServicer_to_server, servicer, "trainer")
    await server.start()
    async with TrainerClient(server.address) as client:
        yield servicer, client
    await server.stop()


def remote(
    reason: str, code: grpc.StatusCode = grpc.StatusCode.ABORTED, **metadata: str
) -> RemoteError:
    return RemoteError(code, reason, "no", metadata)


LOST = remote("RANK_LOST")


class Work:
    """Fails with each of `errors` in turn, then goes well."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize(
    "error",
    [LOST, remote("", grpc.StatusCode.UNAVAILABLE), TrainerLostError("step")],
    ids=["reason", "code", "of the loop"],
)
async def test_of_a_lost_trainer_what_it_had_is_restored_instead(trainer, error: Exception) -> None:
    servicer, client = trainer
    loading = pb.Trainer(state=pb.Trainer.STATE_LOADING)
    servicer.answers = [loading, *servicer.answers]
    work, restore = Work(error), Work(error)
    await TrainerRecovery(client, restore, PATIENCE).run(work)
    assert (work.calls, restore.calls) == (1, 2)
    assert servicer.answers == servicer.answers[-1:]  # it was waited for


async def test_what_a_trainer_refuses_is_no_loss_of_it(trainer) -> None:
    work, restore = Work(remote("INVALID_FIELD")), Work()
    with pytest.raises(RemoteError, match="INVALID_FIELD"):
        await TrainerRecovery(trainer[1], restore, PATIENCE).run(work)
    assert (work.calls, restore.calls) == (1, 0)


async def test_a_trainer_that_is_lost_over_and_over_without_a_step_ends_the_run(trainer) -> None:
    restore = Work()
    recovery = TrainerRecovery(trainer[1], restore, PATIENCE)
    for _ in range(TRAINER_LOSSES):
        await recovery.run(Work(LOST))
    recovery.note_step()  # from here on they count
    for _ in range(TRAINER_LOSSES):
        await recovery.run(Work(LOST))
    assert restore.calls == 2 * TRAINER_LOSSES
    with pytest.raises(RemoteError, match="RANK_LOST"):
        await recovery.run(Work(LOST))
    assert restore.calls == 2 * TRAINER_LOSSES


async def test_a_column_that_nobody_gives_ends_the_run_as_it_is_missed_for_the_third_time(
    trainer,
) -> None:
    """As of a loss that reads one; ranks that were restarted miss what they had computed."""
    restore = Work()
    recovery = TrainerRecovery(trainer[1], restore, PATIENCE)
    missing, other = (remote("COLUMN_MISSING", columns=name) for name in ("ref", "values"))
    for error in (missing, other, missing, other):
        await recovery.run(Work(error))
    with pytest.raises(RemoteError, match="COLUMN_MISSING"):
        await recovery.run(Work(missing))
    recovery.note_step()
    await recovery.run(Work(missing))
    assert restore.calls == 5


async def test_a_call_that_is_late_time_and_again_ends_the_run(trainer) -> None:
    """A trainer may have stood still; one that needs longer than a call may take will again."""
    restore = Work()
    recovery = TrainerRecovery(trainer[1], restore, PATIENCE)
    late = remote("", grpc.StatusCode.DEADLINE_EXCEEDED)
    for _ in range(2):
        for _ in range(2):
            await recovery.run(Work(late))
        recovery.note_step()
    assert restore.calls == 4
    restore.errors = [late] * 2  # after the first, of the work
    with pytest.raises(RemoteError, match="DEADLINE_EXCEEDED"):
        await recovery.run(Work(late))
    assert restore.calls == 6
    refused = remote("WAIT_TIMED_OUT", grpc.StatusCode.DEADLINE_EXCEEDED)  # as a server says
    recovery.note_step()
    with pytest.raises(RemoteError, match="WAIT_TIMED_OUT"):
        await recovery.run(Work(refused))
    assert restore.calls == 6


async def test_a_trainer_that_failed_is_not_waited_for(trainer) -> None:
    servicer, client = trainer
    servicer.answers = [pb.Trainer(state=pb.Trainer.STATE_FAILED, failure="rank 1 has no memory")]
    with pytest.raises(TrainerBrokenError, match="rank 1 has no memory"):
        await active_trainer(client)


async def test_a_trainer_that_answers_too_late_is_asked_again(trainer, monkeypatch) -> None:
    monkeypatch.setitem(DEADLINES, "GetTrainer", 0.2)
    servicer, former = trainer
    loading = pb.Trainer(state=pb.Trainer.STATE_LOADING)  # which is all the same to who asks this
    servicer.answers, servicer.late = [loading], 2
    async with TrainerClient(former.address) as client:
        assert await describe_trainer(client, PATIENCE) == loading
        assert servicer.late == 0
        servicer.late = 1000
        with pytest.raises(TrainerBrokenError, match=r"not ready in 1 s: .*DEADLINE_EXCEEDED"):
            await describe_trainer(client, 1.0)


async def test_of_two_trainers_the_one_that_failed_is_named(trainer, tmp_path: Path) -> None:
    """By what it is to the run and where it is, not by a name that both may have."""
    servicer, client = trainer
    file = tmp_path / "services.json"
    file.write_text(json.dumps({"values": {"kind": "trainer", "address": client.address}}))
    servicer.answers = [pb.Trainer(state=pb.Trainer.STATE_FAILED, name="trainer", failure="no")]
    where = f"critic at {client.address} (values of {file})"
    config = parse_config(CriticConfig, {"service": "values"})
    critic = Critic(f"{file}#values", config, SecurityConfig(), PATIENCE)
    with pytest.raises(TrainerBrokenError, match=rf"^{re.escape(where)} failed: no$"):
        await critic.describe()
    with pytest.raises(RemoteError) as error:
        await critic.client.compute_values("batches/b")
    assert text_of(error.value).startswith(f"{where}: UNIMPLEMENTED/")
    report = RunReport(tmp_path, 1)
    with pytest.raises(RemoteError), report:
        report.begin("train", {})
        raise error.value
    assert where in read_journal(tmp_path)[-1]["text"]
    await critic.client.close()


async def test_a_checkpoint_of_another_step_is_of_a_trainer_that_was_lost() -> None:
    async def answer() -> pb.SaveCheckpointResponse:
        return pb.SaveCheckpointResponse(checkpoint="checkpoints/a", step=2)

    assert await SavingCheckpoint(2, answer()).name() == "checkpoints/a"
    with pytest.raises(TrainerLostError, match="checkpoint of step 2, this run is at 3"):
        await SavingCheckpoint(3, answer()).name()


def test_a_checkpoint_that_never_loads_is_told_from_one_that_does_not_now() -> None:
    assert is_checkpoint_lost(CheckpointLostError("of another step"))
    assert is_checkpoint_lost(remote("CHECKPOINT_DAMAGED"))
    assert not is_checkpoint_lost(LOST)


def test_the_blob_that_a_trainer_cannot_take_is_the_one_that_is_made_again() -> None:
    groups = [
        LedgerGroup(
            position=number,
            group_id=f"a/{number}",
            state="generated",
            issue_step=0,
            blob=BlobReference(f"{number:032x}", 1) if number else None,
        )
        for number in range(3)
    ]
    for reason in ("BLOB_NOT_FOUND", "DIGEST_MISMATCH"):
        assert lost_blob(remote(reason, blob="b", name="n"), groups) == "b"
        assert lost_blob(remote(reason, name="n"), groups) == "n"
    assert lost_blob(remote("RANK_LOST", blob="b"), groups) is None
    other = [remote("TEMPERATURE_MISMATCH", sample_id=f"a/{number}/7") for number in range(4)]
    digests = [lost_blob(error, groups) for error in other]
    assert digests == [None, f"{1:032x}", f"{2:032x}", None]
