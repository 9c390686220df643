"""`sluice check` of what a run reads, calls and writes."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.loop.ledger import Ledger
from sluice.loop.run_directory import RUN_CHECKPOINTS, RunCheckpoint, write_run_checkpoint
from sluice.preflight import places
from tests.unit.preflight.conftest import ROWS, Files

FUNCTIONS = """
def keep(group, *, above):
    return True

def reward(task, response):
    return 1.0

def generate(episode):
    return []

async def generate_from(episode, settings):
    return []

def weights(step, scalars):
    return {}

broken = 3
"""


def rows(*given: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.run["prompts"] = {"file": str(files.write_rows("own.jsonl", *given))}

    return change


def text(content: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        (files.folder / "own.jsonl").write_text(content)
        files.run["prompts"] = {"file": str(files.folder / "own.jsonl")}

    return change


def environment(name: str = "prompts", **settings: Any) -> Callable[[Files], None]:
    return lambda files: files.run.update(environment={"name": name, "settings": settings})


def evaluated(**data: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        prompts = {"file": str(files.folder / "rows.jsonl")}
        files.run["evaluation"] = {"datasets": {"held": {"prompts": prompts, **data}}}

    return change


def functions(change: Callable[[Files], None]) -> Callable[[Files], None]:
    """With a module of a user beside the files, which workers may import."""

    def changed(files: Files) -> None:
        (files.folder / "own_functions.py").write_text(FUNCTIONS)
        files.rollout["episodes"] = {"user_modules": ["own_functions"]}
        change(files)

    return changed


LONG = {"prompt": "1" * 40, "answer": "1"}
ALMOST = {"prompt": "1" * 13, "answer": "1"}

CASES: dict[str, tuple[Callable[[Files], None], str]] = {
    "no file": (
        lambda files: files.run.update(prompts={"file": "none.jsonl"}),
        r"wrong prompts: prompts.file: none.jsonl does not exist",
    ),
    "an empty file": (text(""), r"wrong prompts: prompts.file: .*own.jsonl has no rows"),
    "no JSON": (text('{"prompt": "1="}\n{"prompt'), r"wrong prompts: .*own.jsonl:2: not JSON"),
    "a row without prompt": (
        rows({"prompt": "1=", "answer": "1"}, {"question": "2="}),
        r"wrong prompts: .*own.jsonl:2: a row needs `prompt` or `messages`, and has `question`",
    ),
    "a row without answer": (
        rows({"prompt": "1=", "answer": "1"}, {"prompt": "2="}),
        r"wrong prompts: 1 of the 2 tasks looked at cannot be made: .*own.jsonl:2: .*answer",
    ),
    "no row that is wanted": (
        lambda files: files.run["prompts"].update(where={"level": 3}),
        r"wrong prompts: prompts.where: no row has 3 at 'level'",
    ),
    "a prompt that is too long": (
        rows({"prompt": "1=", "answer": "1"}, LONG),
        r"wrong prompts: .*own.jsonl:2: a prompt of 40 tokens, and engines take 16 with the "
        r"answer \(engine.max_model_length\): 1 of the 2 looked at have no room",
    ),
    "few rows without answer": (
        rows(*[{"prompt": "1=", "answer": "1"}] * 2, {"prompt": "2="}),
        r"warning prompts: 1 of the 3 tasks looked at cannot be made: .*own.jsonl:3: .*answer",
    ),
    "few prompts that are too long": (
        rows(*[{"prompt": "1=", "answer": "1"}] * 2, LONG),
        r"warning prompts: .*own.jsonl:3: a prompt of 40 tokens, .*1 of the 3 looked at have",
    ),
    "an answer that is cut": (
        rows({"prompt": "1=", "answer": "1"}, ALMOST),
        r"warning prompts: .*:2: a prompt of 13 tokens, .*\(max_new_tokens\): .*1 of the 2",
    ),
    "no file of a data set": (
        evaluated(prompts={"file": "none.jsonl"}),
        r"wrong evaluation.datasets.held.prompts: .*prompts.file: none.jsonl does not exist",
    ),
    "answers of a data set that are cut": (
        evaluated(sampling={"max_new_tokens": 15}),
        r"warning evaluation.datasets.held.prompts: .*answers have up to 15",
    ),
    "an environment": (
        environment("promts"),
        r"wrong environment: environment.name: 'promts' is unknown; known: prompts",
    ),
    "a setting of an environment": (
        environment(rewards="exact_match"),
        r"wrong environment: environment.settings.rewards: unknown key; known: reward",
    ),
    "an environment of a data set": (
        evaluated(environment={"name": "held"}),
        r"wrong evaluation.datasets.held.environment: .*environment.name: 'held' is unknown",
    ),
    "a reward that may not be imported": (
        environment(reward="own_functions:reward"),
        r"wrong environment: environment.settings.reward: own_functions is not among the modules",
    ),
    "a reward that is not there": (
        functions(environment(reward="own_functions:rewards")),
        r"wrong environment: environment.settings.reward: own_functions:rewards names nothing",
    ),
    "a generate function that is none": (
        functions(environment(generate="own_functions:generate")),
        r"wrong environment: .*generate: own_functions:generate is no coroutine function",
    ),
    "a generate function of other arguments": (
        functions(environment(generate="own_functions:generate_from")),
        r"wrong environment: .*generate: own_functions:generate_from: missing a required argument",
    ),
    "a schedule of other arguments": (
        lambda files: files.run.update(
            environments={"a": {k: files.run.pop(k) for k in ("prompts", "environment")}},
            environment_schedule="sluice.loop.mixture:load_schedule",
        ),
        r"wrong environment_schedule: .*load_schedule: is asked with \(step, metrics\): too many",
    ),
    "a filter": (
        lambda files: files.run.update(filters=[{"name": "reward_stdd"}]),
        r"wrong filters: filters.0.name: 'reward_stdd' is unknown; known: reward_std",
    ),
    "a filter's settings": (
        lambda files: files.run.update(filters=[{"name": "finished", "settings": {"of": 1}}]),
        r"wrong filters: filters.0.settings: finished: got an unexpected keyword argument 'of'",
    ),
    "a schedule": (
        lambda files: files.run.update(
            environments={"a": {k: files.run.pop(k) for k in ("prompts", "environment")}},
            environment_schedule="no_such_module:weights",
        ),
        r"wrong environment_schedule: environment_schedule: no_such_module:weights: No",
    ),
    "a loss that may not be imported": (
        lambda files: files.run.update(algorithm={"loss": {"name": "own_functions:Own"}}),
        r"wrong algorithm.loss: algorithm.loss: loss.name: own_functions is not among the modules "
        r"this trainer may import \(user_modules\): none",
    ),
    "a loss that is not there": (
        lambda files: (
            files.run.update(algorithm={"loss": {"name": "own_losses:Own"}}),
            files.trainer.update(user_modules=["own_losses"]),
        ),
        r"wrong algorithm.loss: algorithm.loss: .*own_losses",
    ),
    "a loss that is none": (
        functions(
            lambda files: (
                files.run.update(algorithm={"loss": {"name": "own_functions:broken"}}),
                files.trainer.update(user_modules=["own_functions"]),
            )
        ),
        r"wrong algorithm.loss: algorithm.loss: .*own_functions:broken",
    ),
    "a tracker": (
        lambda files: files.run.update(trackers={"wandb": {"project": "p"}}),
        r"wrong trackers: trackers.wandb: wandb is not installed; pip install 'sluice\[wandb\]'",
    ),
    "a directory that is a file": (
        lambda files: (
            (files.folder / "file").touch(),
            files.run.update(run_dir=str(files.folder / "file" / "run")),
        ),
        r"wrong run_dir: .*/file is no directory",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_what_a_run_reads_is_told(
    files: Files, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    change, expected = CASES[case]
    change(files)
    found = files.faults()
    assert any(re.search(expected, each) for each in found), found


@pytest.mark.parametrize(
    "change",
    [
        rows({"prompt": "1" * 12, "answer": "1"}),
        evaluated(sampling={"max_new_tokens": 8}),
        functions(environment(reward="own_functions:reward")),
        lambda files: files.run.update(filters=[{"name": "finished", "settings": {"share": 0.5}}]),
        lambda files: files.run.update(algorithm={"loss": {"name": "reinforce"}}),
    ],
)
def test_what_is_right_is_passed_over(files: Files, change: Callable[[Files], None]) -> None:
    change(files)
    assert files.faults() == []


def test_as_many_rows_are_tried_as_are_asked_for(files: Files) -> None:
    rows(*ROWS, LONG)(files)
    assert files.faults(rows=40) == []
    assert any(":41: a prompt of 40" in each for each in files.faults(rows=41))
    assert any(":41: a prompt of 40" in each for each in files.faults(rows=0))
    told = [finding.text for finding in files.findings(rows=40)]
    assert "the longest prompt of 40 looked at has 3 tokens" in told


def test_rows_of_conversations_are_tokenised(files: Files) -> None:
    long, none = {"prompt": "1" * 30, "answer": "1"}, {"prompt": "1=", "answer": 3}
    files.run = {
        "run_dir": files.run["run_dir"],
        "services": files.run["services"],
        "tokenizer": str(files.model),
        "rows": {"file": str(files.folder / "rows.jsonl")},
    }
    assert files.faults() == []
    assert any("`sluice sft`" in finding.text for finding in files.findings())
    files.trainer["max_tokens_per_micro_batch"] = 16
    files.run["rows"] = {"file": str(files.write_rows("own.jsonl", ROWS[0], long))}
    (fault,) = files.wrong()
    assert re.search(r"own.jsonl:2: 32 tokens, a micro-batch holds 16: give the trainer", fault)
    files.run["rows"] = {"file": str(files.write_rows("own.jsonl", ROWS[0], none))}
    assert "give `messages`, or `prompt` and `answer`" in files.wrong()[0]
    files.run["rows"] = {"file": str(files.write_rows("own.jsonl", ROWS[0]))}
    files.run["held_out"] = {"file": "none.jsonl"}
    assert files.wrong() == ["held_out.file: none.jsonl does not exist"]
    del files.run["held_out"]
    files.trainer["head"] = "reward"
    (fault,) = files.wrong(kind="sft")
    assert fault.endswith("and `sluice sft` needs head: policy")


def test_pairs_are_known_by_their_rows_or_the_head_of_the_trainer(files: Files) -> None:
    pair = {"prompt": "1=", "chosen": "1", "rejected": "2"}
    files.run = {
        "run_dir": files.run["run_dir"],
        "services": files.run["services"],
        "tokenizer": str(files.model),
        "rows": {"file": str(files.write_rows("pairs.jsonl", pair))},
    }
    assert "`sluice dpo`" in " ".join(finding.text for finding in files.findings())
    files.trainer["head"] = "reward"
    assert "`sluice reward-model`" in " ".join(finding.text for finding in files.findings())
    assert files.faults() == []


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """By another process, for all that looks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711")
        file.flush()
        yield


def test_a_loop_that_is_at_work_is_told(files: Files) -> None:
    with held(files.folder / "run" / ".loop.lock"):
        (fault,) = files.wrong()
    assert re.search(r"run_dir: process 4711 \(sluice loop\) works in .*; stop it, or", fault)
    assert files.faults() == []


def test_ports_of_services_that_run_are_theirs(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        files.trainer["server"] = {"port": taken.getsockname()[1]}
        (fault,) = files.wrong()
        assert fault.startswith("server.port: 127.0.0.1:")
        with held(files.folder / "up" / ".up.lock"):
            assert files.faults() == []


def test_a_directory_that_holds_a_run_is_told_unless_it_is_resumed(files: Files) -> None:
    run_dir = files.folder / "run"
    run_dir.mkdir()
    Ledger(run_dir / "ledger.sqlite").close()
    made = RunCheckpoint(
        step=3,
        optimizer_step=3,
        checkpoint="checkpoints/3",
        weight_version=3,
        weight_digest="",
        position=0,
        seed=0,
    )
    write_run_checkpoint(run_dir / RUN_CHECKPOINTS, made)
    (fault,) = files.wrong()
    assert fault.startswith(f"run_dir: {run_dir} holds a run; give resume: true (--resume)")
    assert files.wrong("--resume") == []
    (fault,) = files.wrong("--resume", "--seed", "4")
    assert fault.startswith("seed: is 4, the run to resume has 0")


def test_a_disk_that_is_too_small_is_told(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage

    def with_room(size: int) -> Callable[[object], Any]:
        return lambda path: real(path)._replace(free=size)  # type: ignore[attr-defined]

    parameters = 100_000
    monkeypatch.setattr(places.shutil, "disk_usage", with_room(20 * parameters))
    fault = next(each for each in files.wrong() if "keep_versions" in each)
    assert "3 checkpoints at once" in fault
    files.trainer["lora"] = {"rank": 2}
    assert not any("keep_versions" in each for each in files.wrong())
    del files.trainer["lora"]
    assert not any("keep_versions" in each for each in files.wrong("--resume"))
    monkeypatch.setattr(places.shutil, "disk_usage", with_room(100 << 30))
    assert files.faults() == []


def test_without_services_what_can_be_seen_is_told(files: Files) -> None:
    (fault,) = files.faults(up=False)
    assert "services.json is not there, which `sluice up` writes" in fault
    files.run["prompts"] = {"file": "none.jsonl"}
    assert files.wrong(up=False) == ["prompts.file: none.jsonl does not exist"]
    path = files.folder / "up" / "services.json"
    path.parent.mkdir()
    path.write_text('{"router": {"kind": "router", "address": "127.0.0.1:1", "store": "s"}}')
    assert any("has no trainer, or several" in each for each in files.wrong(up=False))


def test_nothing_is_written_or_left_behind(files: Files) -> None:
    files.paths()
    before = sorted(files.folder.rglob("*"))
    assert files.faults() == []
    assert sorted(files.folder.rglob("*")) == before


def test_code_of_users_that_cannot_even_be_imported_is_a_finding(files: Files) -> None:
    (files.folder / "torn_functions.py").write_text("raise RuntimeError('no such cluster')\n")
    files.rollout["episodes"] = {"user_modules": ["torn_functions"]}
    files.trainer["user_modules"] = ["torn_functions"]
    environment(reward="torn_functions:reward")(files)
    files.run["algorithm"] = {"loss": {"name": "torn_functions:Own"}}
    found = "\n".join(files.faults())
    assert re.search(r"wrong environment: environment: .*no such cluster", found)
    assert "algorithm.loss: RuntimeError: no such cluster" in found


def test_a_file_that_may_not_be_read_is_a_finding(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, path = Path.open, files.folder / "rows.jsonl"

    def refuse(given: Path, *arguments: Any, **options: Any) -> Any:
        if given == path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(given, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert f"{path}: Permission denied" in files.wrong()
