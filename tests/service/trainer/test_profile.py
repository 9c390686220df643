"""Profiles of ranks: whole files of the steps asked for, and a training that does not notice."""

from __future__ import annotations

import gzip
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.api.common.v1 import profile_pb2
from sluice.client import RemoteError, TrainerClient
from tests.service.trainer.harness import (
    ACTIVE,
    GRPO,
    RunningTrainer,
    end,
    make_groups,
    running_trainer,
    train_step,
    until,
    upload,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningTrainer]:
    """A trainer of two ranks."""
    root = tmp_path_factory.mktemp("pair")
    with running_trainer(root, model, ranks={"count": 2, "restart_backoff": 0.1}) as running:
        yield running


@pytest.fixture
async def two(pair: RunningTrainer) -> AsyncIterator[TrainerClient]:
    async with pair.client() as client:
        await until(client, lambda now: now.state == ACTIVE)
        yield client


def events_of(profile: profile_pb2.Profile, file: str) -> list[dict[str, Any]]:
    with gzip.open(Path(profile.directory, file)) as trace:
        events: list[dict[str, Any]] = json.load(trace)["traceEvents"]
    return events


def files_in(directory: str) -> list[str]:
    path = Path(directory)
    return sorted(each.name for each in path.iterdir()) if path.exists() else []


@contextmanager
def obstructed(directory: str) -> Iterator[None]:
    """A file is where the directory would be."""
    path = Path(directory)
    path.parent.mkdir(exist_ok=True)
    path.write_text("in its place")
    yield
    path.unlink()


async def test_a_profile_has_the_commands_of_its_steps_and_changes_no_number(
    client: TrainerClient,
) -> None:
    batch = await upload(client, "profiled", make_groups("p"))
    await client.save_checkpoint("before-profile")
    plain = [await train_step(client, batch) for _ in range(3)]
    await client.load_checkpoint("checkpoints/before-profile")
    batch = await upload(client, "profiled", make_groups("p"))
    options = profile_pb2.ProfileOptions(stacks=True, memory=True)
    begun = await client.profile(steps=2, options=options, name="of-two-steps")
    assert (begun.name, begun.left_count, list(begun.files)) == ("of-two-steps", 2, [])
    recorded = [await train_step(client, batch)]
    midway = (await client.get()).profile
    assert (midway.left_count, list(midway.files)) == (1, [])
    assert not files_in(begun.directory)
    recorded += [await train_step(client, batch) for _ in range(2)]
    ended = (await client.get()).profile
    assert [each.digest for each in recorded] == [each.digest for each in plain]
    assert (ended.left_count, ended.failure) == (0, "")
    assert list(ended.files) == ["rank-0.trace.json.gz"]
    assert files_in(ended.directory) == list(ended.files)
    events = events_of(ended, "rank-0.trace.json.gz")
    named = Counter(each["name"] for each in events if each.get("cat") == "user_annotation")
    assert named["step"] == named["forward_backward"] == 2
    assert named["publish"] == 1, "that of the last step comes after it"
    assert any(each.get("cat") == "python_function" for each in events), "stacks"
    assert any(each["name"] == "aten::mm" for each in events)


async def test_the_ranks_that_are_named_record(two: TrainerClient) -> None:
    batch = await upload(two, "named", make_groups("n"))
    await two.profile(ranks=[1])
    await train_step(two, batch)
    assert list((await two.get()).profile.files) == ["rank-1.trace.json.gz"]
    await two.profile(ranks=[1, 0])
    await train_step(two, batch)
    ended = (await two.get()).profile
    assert [file for file in ended.files if file.endswith("gz")] == [
        "rank-0.trace.json.gz",
        "rank-1.trace.json.gz",
    ]
    await two.delete_batch(batch)


async def test_another_profile_takes_the_place_of_one_that_records(two: TrainerClient) -> None:
    batch = await upload(two, "replaced", make_groups("r"))
    first = await two.profile(steps=5, ranks=[0, 1])
    await train_step(two, batch)
    second = await two.profile(ranks=[0])
    assert first.name < second.name, "names sort by time"
    await train_step(two, batch)
    ended = (await two.get()).profile
    assert (ended.name, list(ended.files)) == (second.name, ["rank-0.trace.json.gz"])
    assert not files_in(first.directory)
    await two.delete_batch(batch)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"steps": 0}, "step_count"),
        ({"steps": 101}, "step_count"),
        ({"steps": -1}, "step_count"),
        ({"steps": 2**31 - 1}, "step_count"),
        ({"ranks": [1]}, "ranks"),
        ({"ranks": [-1]}, "ranks"),
        ({"ranks": [0, 0]}, "ranks"),
        ({"ranks": [0] * 100_000}, "ranks"),
        ({"name": "../there"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": ".hidden"}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "a" * 5000}, "name"),
    ],
    ids=lambda wrong: str(wrong)[:30],
)
async def test_what_cannot_be_profiled_is_refused(
    client: TrainerClient, wrong: dict[str, Any], field: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        await client.profile(**wrong)
    assert caught.value.metadata["field"] == field


async def test_a_profile_that_cannot_be_written_fails_no_step(
    client: TrainerClient, trainer: RunningTrainer
) -> None:
    batch = await upload(client, "unwritten", make_groups("u"))
    begun = await client.profile(name="unwritten")
    step = (await client.get()).step
    with obstructed(begun.directory):
        await train_step(client, batch)
    ended = await client.get()
    assert (ended.step, ended.profile.left_count, list(ended.profile.files)) == (step + 1, 0, [])
    assert ended.profile.failure.startswith("rank 0: FileExistsError: ")
    await train_step(client, batch)
    assert (await client.get()).profile == ended.profile, "a run goes on while somebody asks"
    await client.profile()
    await train_step(client, batch)
    assert (await client.get()).profile.files


async def test_ranks_that_are_lost_end_a_profile_and_it_says_so(two: TrainerClient) -> None:
    batch = await upload(two, "lost", make_groups("l"))
    await two.save_checkpoint("before-loss")
    before = await two.get()
    await two.profile(steps=2, ranks=[0, 1])
    await train_step(two, batch)
    end(before.ranks[1].process_id, signal.SIGKILL)
    again = await until(
        two, lambda now: now.state == ACTIVE and now.restart_count > before.restart_count
    )
    assert again.profile.left_count == 1
    assert again.profile.failure.startswith("the ranks were lost: rank 1 ")
    await two.compute_advantages(batch, GRPO)
    await two.profile()
    await train_step(two, batch)
    ended = (await two.get()).profile
    assert (ended.left_count, ended.failure) == (0, "")
    assert ended.files
