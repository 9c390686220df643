"""Graders in processes: slow and dying ones harm nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from services.rollout.config import GraderPoolConfig
from services.rollout.environments import isolation
from services.rollout.environments.environment import (
    Response,
    Reward,
    SettingError,
    Task,
    TaskError,
    TaskRequest,
)
from services.rollout.environments.isolation import (
    PRINTED_BYTES,
    WORKER_MODULE,
    EnvironmentFailedError,
    GraderCrashedError,
    GraderTimeoutError,
)
from services.rollout.environments.registry import ENVIRONMENTS
from services.rollout.environments.runner import Environments, PooledRunner, Runner
from tests.patience import PATIENCE, growing
from tests.unit.rollout import grim

ANSWERS = [Response(text="a"), Response(text="b")]


def create_environments(**values: Any) -> Environments:
    config = GraderPoolConfig(**{"size": 2, "timeout_seconds": PATIENCE, **values})
    return Environments({"grim": grim.PATH}, config, tokenizer=None)  # type: ignore[arg-type]


@pytest.fixture
async def environments() -> AsyncIterator[Environments]:
    made = create_environments()
    yield made
    await made.close()


async def grader(environments: Environments, **values: Any) -> Runner:
    runner = await environments.create_runner("grim", values)
    assert isinstance(runner, PooledRunner)
    return runner


def deed(name: str, **state: Any) -> Task:
    return Task(prompt="x", state={"deed": name, **state})


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


def values_of(rewards: list[Reward]) -> list[float]:
    return [reward.reward for reward in rewards]


def pids(marks: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in sorted(marks.iterdir())]


def folders(marks: Path) -> set[Path]:
    """Temporary ones that graders made and left."""
    return {Path(text) for path in marks.glob("litter-*") if (text := path.read_text())}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_marks(marks: Path, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(pids(marks)) < count:
            await asyncio.sleep(0.01)


async def until_ended(marks: Path) -> None:
    """What has been killed is there until init has reaped it, once its keeper is gone."""
    async with asyncio.timeout(PATIENCE):
        while any(is_alive(pid) for pid in pids(marks)):
            await asyncio.sleep(0.01)


async def test_tasks_and_rewards_cross_the_process_border(environments: Environments) -> None:
    runner = await grader(environments)
    task = await runner.make_task(TaskRequest(row={"prompt": "ü\n", "deed": "chatter"}))
    assert (task.prompt, task.state) == ("ü\n", {"deed": "chatter"})
    rewards = await runner.reward(task, ANSWERS)
    assert [reward.reward for reward in rewards] == [1.0, 1.0]


async def test_no_deadline_is_too_long() -> None:
    environments = create_environments(timeout_seconds=1e12, start_seconds=1e12)
    runner = await grader(environments)
    assert values_of(await runner.reward(deed("smile"), ANSWERS)) == [1.0, 1.0]
    await environments.close()


async def test_what_a_grader_prints_or_reads_is_no_part_of_its_calls(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    for _ in range(3):
        assert values_of(await runner.reward(deed("chatter"), ANSWERS)) == [1.0, 1.0]
    assert len(set(pids(tmp_path))) == 1, "it was ended for what it printed"


async def test_the_log_has_a_part_of_what_graders_print_and_how_much_is_left_out(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "PRINTED_SECONDS", PATIENCE)
    monkeypatch.setattr(isolation, "STOP_SECONDS", PATIENCE)
    environments = create_environments()
    runner = await grader(environments, marks=str(tmp_path))
    for _ in range(3):
        assert values_of(await runner.reward(deed("print", size=10_000_000), ANSWERS)) == [1.0, 1.0]
    await environments.close()
    printed = capfd.readouterr().err
    assert len(printed) <= PRINTED_BYTES
    assert len(set(pids(tmp_path))) == 1
    found = re.findall(
        r"printed (\d+) bytes more, left out here; the last of them: (.*)", caplog.text
    )
    assert len(printed) + sum(int(count) for count, _ in found) == 30_000_000
    assert found[-1][1].endswith("end")


async def test_a_log_that_nobody_reads_holds_up_no_grader(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "w") as stream:
        stream.write("x" * 65536)  # what a pipe holds
        stream.flush()
        monkeypatch.setattr(sys, "stderr", stream)
        runner = await grader(environments)
        for _ in range(3):
            assert values_of(await runner.reward(deed("print", size=10_000), ANSWERS)) == [1.0, 1.0]
        await environments.close()


async def test_a_service_whose_package_was_replaced_is_told_to_restart(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "PROTOCOL", isolation.PROTOCOL - 1)
    runner = await grader(environments)
    told = f"version {isolation.PROTOCOL} .* version {isolation.PROTOCOL + 1}: .* restart it"
    with pytest.raises(EnvironmentFailedError, match=told):
        await runner.reward(deed("smile"), ANSWERS)


async def test_a_child_that_returns_from_its_parents_call_answers_nothing(
    environments: Environments,
) -> None:
    runner = await grader(environments)
    for number in range(5):
        found = await runner.reward(deed("fork", value=float(number)), ANSWERS)
        assert values_of(found) == [number, number], "rewards of another group"


@pytest.mark.parametrize(
    "line",
    [
        '{"value": [{"reward": 7.0}, {"reward": 7.0}]}',
        '{"id": "1", "value": [{"reward": 7.0}, {"reward": 7.0}]}',
        "[" * 50_000,
    ],
    ids=["no_id", "wrong_id", "no_json"],
)
async def test_a_reply_that_answers_no_call_ends_its_process(tmp_path: Path, line: str) -> None:
    environments = create_environments(attempts=1)
    runner = await grader(environments, marks=str(tmp_path))
    with pytest.raises(GraderCrashedError, match="answers no call"):
        await runner.reward(deed("forge", line=f"{line}\n"), ANSWERS)
    assert values_of(await runner.reward(deed("smile"), ANSWERS)) == [1.0, 1.0]
    forged, good = pids(tmp_path)
    assert forged != good
    await environments.close()
    await until_ended(tmp_path)


async def test_a_line_between_calls_ends_its_process(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    late = deed("forge_later", line='{"value": [{"reward": 7.0}, {"reward": 7.0}]}\n')
    assert values_of(await runner.reward(late, ANSWERS)) == [1.0, 1.0]
    (first,) = pids(tmp_path)
    (tmp_path / "later").touch()
    async with asyncio.timeout(PATIENCE):
        while is_alive(first):
            await asyncio.sleep(0.01)
    (tmp_path / "later").unlink()
    assert values_of(await runner.reward(deed("smile"), ANSWERS)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", r"rewards\[0\]\.reward is nan"),
        ("text", r"rewards\[0\]\.reward is '1' \(str\)"),
        ("truth", r"rewards\[0\]\.reward is True \(bool\)"),
        ("long", r"rewards\[0\]\.reward is .* up to 1e\+30"),
    ],
)
async def test_a_reward_of_a_wrong_type_is_named(
    environments: Environments, tmp_path: Path, name: str, message: str
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    with pytest.raises(EnvironmentFailedError, match=message):
        await runner.reward(deed(name), ANSWERS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a\ud800", "deed": ""}, "Task.prompt holds half a surrogate pair"),
        ({"prompt": "", "deed": float("inf")}, "Task.state holds a number that is not finite"),
        ({"prompt": "", "deed": nested(300)}, "Task.state is nested deeper than 100 levels"),
        ({"deed": "nothing"}, "gave NoneType, no Task"),
        ({"deed": "object"}, "gave dict, no Task"),
        ({"deed": "set"}, "Task.state holds {1} (set), which JSON has not"),
        ({"deed": "bytes"}, "Task.messages holds b'x' (bytes), which JSON has not"),
    ],
    ids=["surrogate", "infinite", "deep", "nothing", "object", "set", "bytes"],
)
async def test_a_task_that_is_none_or_no_json_is_named(
    environments: Environments, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentFailedError, match=re.escape(message)) as caught:
        await (await grader(environments)).make_task(TaskRequest(row=row))
    assert "worker.py" not in str(caught.value), "the place is none of the environment's"


@pytest.mark.parametrize("name", ["litter", "stall_with_litter", "die_with_litter"])
async def test_what_a_grader_started_ends_with_it(tmp_path: Path, name: str) -> None:
    environments = create_environments(attempts=1)
    runner = await grader(environments, marks=str(tmp_path))
    call = asyncio.create_task(runner.reward(deed(name), ANSWERS))
    await until_marks(tmp_path, 6)
    if name == "litter":
        await call
        assert all(is_alive(pid) for pid in pids(tmp_path))
    else:
        if name == "stall_with_litter":
            call.cancel()
        with pytest.raises((asyncio.CancelledError, GraderCrashedError)):
            await call
    await environments.close()
    await until_ended(tmp_path)
    assert not [folder for folder in folders(tmp_path) if folder.exists()]


async def test_what_a_grader_started_ends_though_its_keeper_is_killed(tmp_path: Path) -> None:
    """Processes in sessions of their own too, which nobody is the parent of any more."""
    environments = create_environments(attempts=1)
    runner = await grader(environments, marks=str(tmp_path))
    call = asyncio.create_task(runner.reward(deed("stall_with_litter"), ANSWERS))
    await until_marks(tmp_path, 6)
    assert all(folder.exists() for folder in folders(tmp_path))
    keeper = psutil.Process(pids(tmp_path)[0]).parent()
    assert keeper is not None and WORKER_MODULE in keeper.cmdline()
    keeper.kill()
    with pytest.raises(GraderCrashedError):
        await call
    await until_ended(tmp_path)
    await environments.close()
    assert not [folder for folder in folders(tmp_path) if folder.exists()]


@pytest.mark.parametrize("name", ["backtrack", "stall_with_litter"])
async def test_graders_and_what_they_started_die_with_their_parent(
    tmp_path: Path, name: str
) -> None:
    """Of one that is killed, also while a grader holds the interpreter lock."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.program", CALLER, str(tmp_path), name)
    )
    await until_marks(tmp_path, 1 if name == "backtrack" else 6)
    process.kill()
    async with asyncio.timeout(PATIENCE):
        await process.wait()
    await until_ended(tmp_path)


CALLER = """
import asyncio, sys
from services.rollout.config import GraderPoolConfig
from services.rollout.environments.environment import Response, Task
from services.rollout.environments.runner import Environments
from tests.unit.rollout import grim

async def main(marks, deed):
    environments = Environments({"grim": grim.PATH}, GraderPoolConfig(), tokenizer=None)
    runner = await environments.create_runner("grim", {"marks": marks})
    await runner.reward(Task(prompt="x", state={"deed": deed}), [Response(text="a")])

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_warm_process_is_used_again(environments: Environments, tmp_path: Path) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    for _ in range(3):
        await runner.reward(deed("smile"), ANSWERS)
    assert len(set(pids(tmp_path))) == 1


async def test_a_killed_process_is_replaced_and_the_call_repeated(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    rewards = await runner.reward(deed("die_once"), ANSWERS)
    assert len(rewards) == 2
    first, second = pids(tmp_path)
    assert first != second and not is_alive(first) and is_alive(second)


async def test_processes_that_died_idle_cost_no_attempt(tmp_path: Path) -> None:
    environments = create_environments(size=2, timeout_seconds=PATIENCE, attempts=1)
    runner = await grader(environments, marks=str(tmp_path))
    await asyncio.gather(*(runner.reward(deed("smile"), ANSWERS) for _ in range(2)))
    (pool,) = environments._pools.values()
    for process in [idle._process for idle in pool._idle]:
        assert process is not None
        process.kill()
        await process.wait()
    await runner.reward(deed("smile"), ANSWERS)
    await environments.close()


async def test_a_grader_that_always_dies_is_a_typed_error(environments: Environments) -> None:
    with pytest.raises(GraderCrashedError) as caught:
        await (await grader(environments)).reward(deed("die"), ANSWERS)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.INTERNAL,
        "GRADER_CRASHED",
    )
    assert caught.value.metadata["exit_code"] == "-9"
    assert "died: SIGKILL" in str(caught.value)


async def test_an_exception_is_told_and_its_process_replaced(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    told = r"ZeroDivisionError: no mercy, at .*/grim\.py:\d+ in reward$"
    with pytest.raises(EnvironmentFailedError, match=told):
        await runner.reward(deed("raise"), ANSWERS)
    assert len(pids(tmp_path)) == 1, "a bug is not tried again"
    await runner.reward(deed("smile"), ANSWERS)
    assert len(set(pids(tmp_path))) == 2


async def test_slow_graders_leave_the_others_alone(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    slow = asyncio.create_task(runner.reward(deed("stall"), ANSWERS))
    async with asyncio.timeout(PATIENCE):
        while not pids(tmp_path):
            await asyncio.sleep(0.01)
        for _ in range(5):
            await runner.reward(deed("smile"), ANSWERS)
    assert not slow.done(), "the others waited for the slow one"
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_slow_graders_end_at_their_deadline(tmp_path: Path) -> None:
    environments = create_environments(
        size=1, timeout_seconds=0.5, start_seconds=PATIENCE, attempts=1
    )
    runner = await grader(environments, marks=str(tmp_path))
    async with asyncio.timeout(PATIENCE):
        while True:  # until there is a process that has answered
            with contextlib.suppress(GraderTimeoutError):
                await runner.reward(deed("smile"), ANSWERS)
                break
    with pytest.raises(GraderTimeoutError) as caught:
        await runner.reward(deed("stall"), ANSWERS)
    await environments.close()
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "GRADER_TIMED_OUT",
    )


async def test_a_start_has_a_deadline_of_its_own_and_says_where_a_call_blocked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is never warm would otherwise have the time of an import for each call."""
    for seconds in growing(0.5):  # it says so when nearly all of that has passed
        async with asyncio.timeout(PATIENCE):
            environments = create_environments(
                timeout_seconds=seconds, start_seconds=10 * PATIENCE, attempts=1
            )
            runner = await grader(environments, marks=str(tmp_path))
            with pytest.raises(GraderTimeoutError, match=f"`reward` did not answer in {seconds:g}"):
                await runner.reward(deed("stall"), ANSWERS)
            await environments.close()
        said = re.search(r"grim\.py\", line \d+ in reward", capfd.readouterr().err)
        if said:
            break
    assert said


async def test_more_slow_graders_than_places_hold_up_no_quick_one(tmp_path: Path) -> None:
    environments = create_environments(
        size=1, timeout_seconds=PATIENCE, slow_seconds=0.1, max_slow=2
    )
    runner = await grader(environments, marks=str(tmp_path))
    slow = [asyncio.create_task(runner.reward(deed("stall"), ANSWERS)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE):
        await runner.reward(deed("smile"), ANSWERS)
    assert not any(task.done() for task in slow)
    more = asyncio.create_task(runner.reward(deed("stall"), ANSWERS))
    async with asyncio.timeout(PATIENCE):
        while len(pids(tmp_path)) < 4:
            await asyncio.sleep(0.01)
    waiting = asyncio.create_task(runner.reward(deed("smile"), ANSWERS))
    _, pending = await asyncio.wait([waiting], timeout=0.3)
    assert pending, "the number of slow ones is bounded"
    for task in (*slow, more):
        task.cancel()
    await asyncio.gather(*slow, more, return_exceptions=True)
    async with asyncio.timeout(PATIENCE):
        await waiting
        await asyncio.gather(*(runner.reward(deed("smile"), ANSWERS) for _ in range(3)))
    await environments.close()


async def test_a_slow_call_gives_its_place_away_as_soon_as_it_may(tmp_path: Path) -> None:
    environments = create_environments(
        size=1, timeout_seconds=PATIENCE, slow_seconds=0.1, max_slow=1
    )
    runner = await grader(environments, marks=str(tmp_path))
    slow = [asyncio.create_task(runner.reward(deed("stall"), ANSWERS)) for _ in range(2)]
    async with asyncio.timeout(PATIENCE):
        while len(pids(tmp_path)) < 2:
            await asyncio.sleep(0.01)
    quick = asyncio.create_task(runner.reward(deed("smile"), ANSWERS))
    _, pending = await asyncio.wait([quick], timeout=0.3)  # the second is overdue by now
    assert pending
    slow[0].cancel()
    async with asyncio.timeout(PATIENCE):
        await quick
    assert not slow[1].done()
    slow[1].cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await environments.close()


async def test_a_cancelled_call_ends_its_process_at_once(
    environments: Environments, tmp_path: Path
) -> None:
    runner = await grader(environments, marks=str(tmp_path))
    await runner.reward(deed("smile"), ANSWERS)
    stalled = asyncio.create_task(runner.reward(deed("stall"), ANSWERS))
    async with asyncio.timeout(PATIENCE):
        while len(pids(tmp_path)) < 2:
            await asyncio.sleep(0.01)
        stalled.cancel()
        await asyncio.gather(stalled, return_exceptions=True)
        while is_alive(pids(tmp_path)[1]):
            await asyncio.sleep(0.01)


async def test_an_answer_to_a_cancelled_call_is_no_fault_of_its_process(
    environments: Environments, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was on its way: the log of a run that had its groups blamed the environment."""
    runner = await grader(environments, marks=str(tmp_path))
    assert isinstance(runner, PooledRunner)
    await runner.reward(deed("smile"), ANSWERS)
    (process,) = (each._process for each in runner._pool._idle)
    assert process is not None
    transport = process._transport  # type: ignore[attr-defined]
    pipe = transport.get_pipe_transport(1).get_extra_info("pipe")
    answered = asyncio.create_task(runner.reward(deed("smile"), ANSWERS))
    async with asyncio.timeout(PATIENCE):
        while runner._pool._idle:
            await asyncio.sleep(0)
    await asyncio.sleep(0)  # it has been asked
    assert select.select([pipe], [], [], PATIENCE)[0], "no answer"
    answered.cancel()
    await asyncio.gather(answered, return_exceptions=True)
    await until_ended(tmp_path)
    assert not [each.message for each in caplog.records if each.levelno >= logging.WARNING]


async def test_idle_processes_are_ended(tmp_path: Path) -> None:
    environments = create_environments(size=1, idle_seconds=0.1)
    runner = await grader(environments, marks=str(tmp_path))
    await runner.reward(deed("smile"), ANSWERS)
    async with asyncio.timeout(PATIENCE):
        while is_alive(pids(tmp_path)[0]):
            await asyncio.sleep(0.02)
    await runner.reward(deed("smile"), ANSWERS)
    await environments.close()
    await until_ended(tmp_path)


async def test_settings_and_tasks_are_refused_by_key(environments: Environments) -> None:
    with pytest.raises(SettingError) as caught:
        await (await grader(environments, flavour="poison")).open()
    assert caught.value.key == "flavour"
    runner = await environments.create_runner("reasoning_gym", {"dataset": "chain_sum", "size": 3})
    with pytest.raises(TaskError) as refused:
        await runner.make_task(TaskRequest(index=3))
    assert refused.value.key == "index"


async def test_reasoning_gym_runs_in_its_pool_only(environments: Environments) -> None:
    """Its import costs a second, which the episode worker must not pay."""
    code = (
        "import sys; from services.rollout.environments.registry import *;"
        f"load_environment({ENVIRONMENTS['reasoning_gym']!r});"
        "sys.exit(any(name.partition('.')[0] == 'reasoning_gym' for name in sys.modules))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
    runner = await environments.create_runner("reasoning_gym", {"dataset": "chain_sum", "size": 3})
    await runner.open()
    task = await runner.make_task(TaskRequest(index=2))
    right, wrong = await runner.reward(task, [Response(text=task.answer), Response(text="x")])
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_a_path_that_names_no_environment_is_refused() -> None:
    for path in ("no.such:Thing", "json:loads", "tests.unit.rollout.grim:GrimSettings"):
        with pytest.raises(ValueError, match=path):
            Environments({"mine": path}, GraderPoolConfig(), tokenizer=None)  # type: ignore[arg-type]
