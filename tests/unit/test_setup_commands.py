"""`sluice doctor`, `init` and `completion`: what they say of machines, models and mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from services.rollout.config import RolloutConfig
from services.rollout.environments.environment import TaskRequest
from services.rollout.environments.prompts import PromptsSettings, make_row_task
from services.trainer.config import TrainerConfig
from sluice import cli, doctor
from sluice.config import ConfigError, parse_config
from sluice.doctor import DoctorConfig, examine
from sluice.init import write_new
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig
from tests.patience import PATIENCE


@dataclass
class Answer:
    code: int
    out: str
    error: str


def sluice(*arguments: object) -> Answer:
    out, error = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        patch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        code = cli.main()
    return Answer(code, out.getvalue(), error.getvalue())


def found(**config: object) -> dict[str, doctor.Finding]:
    return {each.subject: each for each in examine(parse_config(DoctorConfig, config))}


def test_make_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    """Before pip does, which then finds no torch for it."""
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    root = Path(__file__).parents[2]
    for python in (old, tmp_path / "none"):
        made = subprocess.run(
            ["make", "--directory", root, "setup", f"VENV={tmp_path}/venv", f"PYTHON={python}"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert made.returncode == 2
        assert f"PYTHON: {python} is no Python 3.11 or later; name one" in made.stderr
    assert not (tmp_path / "venv").exists()


def test_a_sound_machine_is_fit_and_left_as_it_was(tmp_path: Path) -> None:
    findings = found(store=tmp_path)
    wrong = [each for each in findings.values() if each.state == doctor.WRONG]
    assert wrong == []
    assert {"python", "packages", "device", "ports", "store", "clock"} <= findings.keys()
    assert list(tmp_path.iterdir()) == []
    assert sluice("doctor", "--store", tmp_path).code == 0


@pytest.mark.parametrize("store", ["missing", "file"])
def test_a_store_that_is_none_is_wrong(tmp_path: Path, store: str) -> None:
    (tmp_path / "file").touch()
    finding = found(store=tmp_path / store)["store"]
    assert finding.state == doctor.WRONG
    assert finding.remedy
    answer = sluice("doctor", "--store", tmp_path / "missing")
    assert answer.code == 2
    assert "-> make it" in answer.out
    assert answer.error == "sluice: doctor: not fit for a run: store\n"


@pytest.mark.parametrize("store", ["a\0b", "x" * 5000])
def test_a_store_that_is_no_path_is_refused(tmp_path: Path, store: str) -> None:
    with pytest.raises(ConfigError, match="store: can be no path"):
        found(store=tmp_path / store)


def test_a_store_that_cannot_be_written_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "fsync", refuse)
    assert "Permission denied" in found(store=tmp_path)["store"].text
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_ahead_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = doctor.time.time()
    monkeypatch.setattr(doctor.time, "time", lambda: begun - 60)
    assert found(store=tmp_path)["clock"].state == doctor.WRONG


def test_a_port_that_is_taken_is_wrong(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert found(store=tmp_path, port=port)["ports"].state == doctor.WRONG
    assert found(store=tmp_path, port=port)["ports"].state == doctor.OK
    assert found(store=tmp_path, host="no.such.host.invalid")["ports"].state == doctor.WRONG


def test_a_device_that_is_not_there_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_DEVICE", "toaster")
    doctor.platform.current.cache_clear()
    try:
        assert "toaster" in found(store=tmp_path)["device"].text
    finally:
        doctor.platform.current.cache_clear()


def test_a_setting_in_the_environment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_STEPS", "3")
    assert found(store=tmp_path)["environment"].state == doctor.WARNING


def a_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    values = {"max_position_embeddings": 1024, **config}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.mark.parametrize(
    "flags", [[], ["--backend", "fsdp"], ["--engine", "sglang", "--backend", "megatron"]]
)
def test_files_of_init_load_in_every_service(tmp_path: Path, flags: list[str]) -> None:
    model = a_model(tmp_path / "a: 'model' # {x}")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    for index, task in enumerate(["chain_sum", str(tmp_path / "tasks.jsonl")]):
        output = tmp_path / f"out{index}"
        answer = sluice("init", model, task, "-o", output, *flags)
        assert (answer.code, answer.error) == (0, "")
        services = yaml.safe_load((output / "services.yaml").read_text())
        run = yaml.safe_load((output / "run.yaml").read_text())
        parse_config(UpConfig, services)
        parse_config(RunConfig, run)
        trainer = services["services"]["trainer"]["config"]
        parse_config(TrainerConfig, {"store": "x", **trainer})
        rollout = services["services"]["rollout"]["config"]
        parse_config(RolloutConfig, {"store": "x", "router": "a:1", "engine_id": "e", **rollout})
        assert trainer["model"] == rollout["tokenizer"] == str(model)
        assert run["services"] == services["run_dir"] + "/services.json"
        assert rollout["engine"]["max_model_length"] == 1024  # no more than the model takes
        assert (output / "run.yaml").read_text().count("#") > 8
        before = (output / "run.yaml").read_bytes()
        again = sluice("init", model, task, "-o", output)
        assert again.code == 2
        assert "is there already" in again.error
        assert (output / "run.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "task", "flags", "told"),
    [
        ({}, "chain_summ", [], "did you mean chain_sum?"),
        ({}, "missing.jsonl", [], "does not exist"),
        ({}, "FOLDER/folder.jsonl", [], "folder.jsonl is no file"),
        ({}, "a\0b", [], "neither a .jsonl"),
        ({}, "x" * 5000, [], "neither a .jsonl"),
        ({"max_position_embeddings": "many"}, "chain_sum", [], "max_position_embeddings"),
        ({"max_position_embeddings": -1}, "chain_sum", [], "max_position_embeddings"),
        ({}, "chain_sum", ["--max_new_tokens", "4096"], "the model takes 1024"),
        ({}, "chain_sum", ["--max_new_tokens", "0"], "max_new_tokens"),
        ({}, "chain_sum", ["--colour", "blue"], "unknown flag --colour"),
    ],
)
def test_a_mistake_writes_nothing(tmp_path: Path, config, task: str, flags, told: str) -> None:
    model = a_model(tmp_path / "model", **config)
    (tmp_path / "folder.jsonl").mkdir()
    task = task.replace("FOLDER", str(tmp_path))
    answer = sluice("init", model, task, "-o", tmp_path / "out", *flags)
    assert (answer.code, len(answer.error.splitlines())) == (2, 1)
    assert told in answer.error
    assert not (tmp_path / "out").exists()


def test_files_that_a_full_disk_cuts_off_are_not_left(tmp_path: Path) -> None:
    texts = {"first": "a", "second": "b" * 5000}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=r"-o: .*: File too large"):
            write_new(tmp_path, texts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_commands_that_init_names_may_be_pasted(tmp_path: Path) -> None:
    model, out = a_model(tmp_path / "model"), tmp_path / "a b"
    answer = sluice("init", model, "chain_sum", "-o", out, "--run_dir", tmp_path / "it's # 1")
    told = [shlex.split(line, comments=True) for line in answer.out.splitlines()[1:]]
    assert [words[2] for words in told] == [
        str(out / "services.yaml"),
        str(out / "run.yaml"),
        str(tmp_path / "it's # 1"),
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("", "has no rows"),
        ("{", "tasks.jsonl:1: not JSON"),
        (
            '{"prompt": "1 + 1", "answer": "2"}\n{"question": "1 + 1", "answer": "2"}\n',
            "tasks.jsonl:2: a row needs `prompt` or `messages`, and has `question`, `answer`",
        ),
        ('{"messages": [], "answer": "2"}', "tasks.jsonl:1: `messages` is empty"),
        ('{"prompt": "1 + 1"}', "tasks.jsonl:1: a row has no `answer`, which rewards compare"),
    ],
)
def test_rows_that_no_run_could_take_are_told(tmp_path: Path, rows: str, told: str) -> None:
    model, tasks = a_model(tmp_path / "model"), tmp_path / "tasks.jsonl"
    tasks.write_text(rows)
    answer = sluice("init", model, tasks, "-o", tmp_path / "out")
    assert (answer.code, len(answer.error.splitlines())) == (2, 1)
    assert "init: TASK: " in answer.error
    assert told in answer.error
    assert not (tmp_path / "out").exists()


def test_columns_by_other_names_are_those_of_the_run(tmp_path: Path) -> None:
    model, tasks = a_model(tmp_path / "model"), tmp_path / "tasks.jsonl"
    tasks.write_text('{"the: question": "1 + 1", "graded": {"truth": 2}}\n')
    named = ["--prompt_key", "the: question", "--answer_key", "graded.truth"]
    for flags, told in (
        (named[:2], "tasks.jsonl:1: a row has no `answer`, which rewards compare; --answer_key"),
        (named[2:], "tasks.jsonl:1: a row needs `prompt` or `messages`, and has `the: question`"),
    ):
        assert told in sluice("init", model, tasks, "-o", tmp_path / "out", *flags).error
    assert sluice("init", model, tasks, "-o", tmp_path / "out", *named).code == 0
    run = yaml.safe_load((tmp_path / "out/run.yaml").read_text())
    parse_config(RunConfig, run)
    settings = PromptsSettings(**run["environment"]["settings"])
    row = json.loads(tasks.read_text())
    task = make_row_task(settings, TaskRequest(row=row))
    assert (task.messages[-1]["content"], task.answer) == ("1 + 1", "2")
    again = sluice("init", model, "chain_sum", "-o", tmp_path / "two", *named)
    assert "--prompt_key: of rows of a file, which 'chain_sum' is not" in again.error


@pytest.mark.parametrize("key", ["a\nb: 1", "}, x", '"', "\u2028", "x" * 5000, "\0"])
def test_a_column_of_any_name_stays_one(tmp_path: Path, key: str) -> None:
    model, tasks = a_model(tmp_path / "model"), tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({key: "1 + 1", "answer": "2"}))
    answer = sluice("init", model, tasks, "-o", tmp_path / "out", "--prompt_key", key)
    assert answer.code == 0
    run = yaml.safe_load((tmp_path / "out/run.yaml").read_text())
    assert run["environment"]["settings"]["prompt_key"] == key


def test_a_damaged_model_is_said(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    for data in (b"", b"{", b"[1]", b"\xff\xfe", b'{"text_config": 5}'):
        (model / "config.json").write_bytes(data)
        answer = sluice("init", model, "chain_sum", "-o", tmp_path / "out")
        assert answer.code in (0, 2)
        assert len(answer.error.splitlines()) <= 1
    assert sluice("init", tmp_path / "nothing", "chain_sum").code == 2


def completed(*words: str) -> list[str]:
    script = sluice("completion", "bash").out
    line = " ".join(f"'{word}'" for word in words)
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _sluice\n"
    asked += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_flags() -> None:
    assert completed("sluice", "st") == ["status"]
    assert set(cli.USAGE) <= set(completed("sluice", ""))
    assert "--groups_per_step" in completed("sluice", "train", "run.yaml", "--gr")
    assert "--evaluation.every_steps" in completed("sluice", "train", "--evaluation.ev")
    assert completed("sluice", "status", "--js") == ["--json"]


def test_other_shells_have_every_command_too() -> None:
    for shell in ("zsh", "fish"):
        script = sluice("completion", shell).out
        assert all(name in script for name in cli.USAGE)
    assert "did you mean bash?" in sluice("completion", "bsh").error
    assert sluice("completion", "a\0" + "x" * 5000).code == 2
