"""`sluice status` over directories as runs leave them, damaged ones, and servers of every mood."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import socket
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from sluice.config import ConfigError, parse_config
from sluice.durable import encode_row
from sluice.loop.journal import RunJournal, read_journal
from sluice.loop.report import RunReport, duration_text, seconds_left
from sluice.loop.screen import curve, number_text, plain_text, status_screen
from sluice.loop.status import StatusConfig, read_status
from sluice.run_commands import status
from sluice.runtime.server import Server, ServerConfig
from sluice.starting import FILE, StartBoard, StartingService, read_starting
from tests.patience import PATIENCE

PATIENT = parse_config(StatusConfig, {"timeout_seconds": PATIENCE})


def row(step: int, **more: Any) -> dict[str, Any]:
    known = {"reward_mean": 0.25 * step, "response_length_mean": 4.0, "skipped": [], "tokens": 300}
    return {"step": step, "step_seconds": 1.5, **known, **more}


def drawn(status: dict[str, Any], width: int = 160) -> str:
    said = io.StringIO()
    Console(file=said, width=width, force_terminal=True).print(status_screen(status))
    return said.getvalue()


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def begun(run_dir: Path, steps: int = 8, **config: Any) -> RunReport:
    report = RunReport(run_dir, steps, Console(file=io.StringIO()))
    report.__enter__()
    report.begin("train", config)
    return report


async def test_a_run_at_work_tells_step_pace_and_end(tmp_path: Path) -> None:
    report = begun(tmp_path, steps=8)
    before = await read_status(str(tmp_path), PATIENT)
    assert before["run"]["state"] == "starting"
    for step in (1, 2):
        report.step(row(step))
    report.note("[red]careful[/red]")
    run = (await read_status(str(tmp_path), PATIENT))["run"]
    assert (run["state"], run["step"], run["steps"], run["kind"]) == ("running", 2, 8, "train")
    assert run["seconds_left"] == 6 * 1.5
    assert run["tokens_per_second"] == 200
    assert run["rewards"] == [0.25, 0.5]
    assert [note["text"] for note in run["notes"]] == ["[red]careful[/red]"]
    screen = drawn(await read_status(str(tmp_path), PATIENT))
    assert "step 2 of 8" in screen
    assert "ends in 9s" in screen
    assert "[red]careful[/red]" in screen  # and not drawn in red
    report.__exit__(None, None, None)
    done = (await read_status(str(tmp_path), PATIENT))["run"]
    assert (done["state"], done["seconds_left"]) == ("done", None)


@pytest.mark.parametrize(
    ("error", "state", "told"),
    [(ValueError("no <b> money"), "failed", "no <b> money"), (KeyboardInterrupt(), "stopped", "")],
)
async def test_how_a_run_ended_is_told(tmp_path: Path, error, state: str, told: str) -> None:
    report = begun(tmp_path)
    report.__exit__(type(error), error, None)
    run = (await read_status(str(tmp_path), PATIENT))["run"]
    assert run["state"] == state
    assert told in run["detail"]


async def test_a_run_that_was_killed_is_gone(tmp_path: Path) -> None:
    begun(tmp_path).__exit__(None, None, None)
    journal = RunJournal(tmp_path)
    start = {"kind": "train", "steps": 3, "host": socket.gethostname()}
    own = psutil.Process().create_time()
    journal.write("start", **start, pid=os.getpid(), process_time=own - 1000)  # number used again
    assert (await read_status(str(tmp_path), PATIENT))["run"]["state"] == "gone"
    journal.write("start", **start, pid=os.getpid(), process_time=own)
    assert (await read_status(str(tmp_path), PATIENT))["run"]["state"] == "starting"
    journal.write("start", **{**start, "host": "elsewhere"}, pid=1, process_time=own)
    assert (await read_status(str(tmp_path), PATIENT))["run"]["state"] == "unknown"
    for pid in (None, "x", -1, 2**70):
        journal.write("start", **start, pid=pid, process_time=own)
        assert (await read_status(str(tmp_path), PATIENT))["run"]["state"] == "gone"


async def test_services_that_are_being_started_are_told_before_there_is_a_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "services").mkdir()
    board = StartBoard(tmp_path)
    board.note(StartingService("router", "router", "127.0.0.1:1", ""))
    board.note(StartingService("trainer", "trainer"))
    found = await read_status(str(tmp_path), PATIENT)
    assert found["run"] is None
    told = [(each["name"], each["health"], each["detail"]) for each in found["services"]]
    assert told == [
        ("router", "no answer", "nobody listens there"),
        ("trainer", "starting", "not started yet: it comes after the services before it"),
    ]
    assert "no address yet" in drawn(found)
    board.clear()
    with pytest.raises(ConfigError, match="holds no run"):
        await read_status(str(tmp_path), PATIENT)


async def test_what_a_killed_supervisor_left_of_a_start_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    StartBoard(tmp_path).note(StartingService("trainer", "trainer"))
    file = tmp_path / FILE
    told = json.loads(file.read_text())
    changes: list[Any] = [{"process_time": 1.0}, {"pid": 2**70}, {"services": 3}]
    changes += [{"services": {"a": value}} for value in (None, {}, {"since": "x"})]
    whole = told["services"]["trainer"]
    changes += [{"services": {"a": whole | {"since": at}}} for at in (10**400, math.nan, -1)]
    for change in changes:
        file.write_text(json.dumps(told | change))
        assert read_starting(tmp_path) == []
    for damaged in ("", "[]", "{", "[" * 100_000, json.dumps(told)[:-9]):
        file.write_text(damaged)
        assert read_starting(tmp_path) == []
    file.write_text(json.dumps(told | {"host": "elsewhere"}))
    assert [each.name for each in read_starting(tmp_path)] == ["trainer"], "it may be at work there"


async def test_a_directory_whose_first_service_gives_no_answer_is_told_as_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with that one's failure alone, and with none at all by an index."""
    for entries in ({}, {"a": {"kind": "router", "address": "127.0.0.1:1"}}):
        (tmp_path / "services.json").write_text(json.dumps(entries))
        await status([str(tmp_path)])
    assert "no answer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "missing", "a\0b", "x" * 5000, "no port"])
async def test_what_is_no_run_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    target = name or str(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no run|neither a run directory nor host:port"):
        await read_status(target, PATIENT)


async def test_why_nobody_answers_is_told_in_few_words(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        begun(tmp_path, trainer=address, router="127.0.0.1:99999")
        found = await read_status(str(tmp_path), PATIENT)
    told = {service["name"]: service for service in found["services"]}
    assert {service["health"] for service in found["services"]} == {"no answer"}
    assert told["trainer"]["detail"] == "nobody listens there"
    assert "a port is 1 to 65535" in told["router"]["detail"]  # 34463 is not asked


async def test_a_service_is_asked_for_by_its_name_in_a_services_json(tmp_path: Path) -> None:
    services = tmp_path / "services.json"
    services.write_text(json.dumps({"first": {"kind": "trainer", "address": "127.0.0.1:9"}}))
    for name in ("first", "trainer"):
        found = await read_status(f"{services}#{name}", PATIENT)
        assert [service["address"] for service in found["services"]] == ["127.0.0.1:9"]
    with pytest.raises(ConfigError, match="has no second, or several; known: first, trainer"):
        await read_status(f"{services}#second", PATIENT)


async def test_of_a_long_run_all_is_counted_and_little_held(tmp_path: Path) -> None:
    begun(tmp_path, steps=5000).__exit__(None, None, None)
    numbers = {f"metric_{number}": number / 7 for number in range(50)}
    rows = [
        row(step, skipped=["NaN"] if step % 100 == 0 else [], **numbers) for step in range(1, 3001)
    ]
    rows.insert(7, {"step": 7, "evaluation": "", "dataset": "old", "score": 0.5})
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(encode_row(each) + b"\n" for each in rows))
    tracemalloc.start()
    run = (await read_status(str(tmp_path), PATIENT))["run"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (run["step"], run["skipped_steps"]) == (3000, 30)
    assert run["scores"] == {"old": {"score": 0.5, "step": 7}}
    assert run["rewards"] == [0.25 * step for step in range(2961, 3001)]
    assert peak < 3 * file.stat().st_size


async def test_a_note_at_no_time_is_shown(tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text() + '{"event": "note", "time": NaN, "text": "when?"}\n')
    assert "when?" in drawn(await read_status(str(tmp_path), PATIENT))


async def test_damaged_files_never_end_in_a_trace_and_nothing_changes(tmp_path: Path) -> None:
    report = begun(tmp_path, services="nowhere/services.json", security={"tls": 5})
    report.step(row(1, reward_mean=math.nan, rollout_mismatch=math.inf, skipped=["NaN"]))
    report.note("<script>\x1b[2J\u202e" + "x" * 5000)
    report.__exit__(None, None, None)
    (tmp_path / "loop.address.json").write_text("[1]")
    for name in ("metrics.jsonl", "journal.jsonl"):
        path = tmp_path / name
        data = path.read_bytes()
        for index in range(0, len(data), max(1, len(data) // 60)):
            path.write_bytes(data[:index] + bytes([data[index] ^ 0x84]) + data[index + 1 :])
            before = contents(tmp_path)
            drawn(await read_status(str(tmp_path), PATIENT))
            path.write_bytes(data[:index] + b"\xff[" * 3000)
            if index:
                json.dumps(await read_status(str(tmp_path), PATIENT), allow_nan=False)
            path.write_bytes(before[str(path)][0])
        path.write_bytes(data)
    before = contents(tmp_path)
    status = await read_status(str(tmp_path), PATIENT)
    screen = drawn(status)
    assert contents(tmp_path) == before
    assert status["run"]["last"]["reward_mean"] is None
    assert status["run"]["skipped_steps"] == 1
    assert "\x1b[2J" not in screen
    assert "\u202e" not in screen
    assert max(map(len, screen.splitlines())) < 400


async def test_a_server_answers_for_itself() -> None:
    server = Server(ServerConfig(host="127.0.0.1"))
    await server.start()
    try:
        with server.waits.waiting("the moon", on=["host:1"], explain=lambda: "it is late"):
            status = await read_status(server.address, PATIENT)
            (service,) = status["services"]
            assert (service["health"], service["kind"]) == ("serving", "")
            assert [(w["what"], w["on"], w["explanation"]) for w in service["waits"]] == [
                ("the moon", ["host:1"], "it is late")
            ]
            assert "it is late" in drawn(status)
        (service,) = (await read_status(server.address, PATIENT))["services"]
        assert service["waits"] == []
    finally:
        await server.stop()


async def test_who_does_not_answer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    """One that listens and is silent, one that is not there; both at once in a run directory."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
        config = parse_config(StatusConfig, {"timeout_seconds": 1.0})
        begun(tmp_path, trainer=address, router=nobody).__exit__(None, None, None)
        status = await asyncio.wait_for(read_status(str(tmp_path), config), PATIENCE)
        assert [s["health"] for s in status["services"]] == ["no answer", "no answer"]
        assert "within 1 s" in status["services"][0]["detail"]


class RunGoesOn(trainer_grpc.TrainerServiceServicer, router_grpc.RouterServiceServicer):
    """A trainer, and a router whose engine gets the next version once the trainer was asked."""

    def __init__(self) -> None:
        self.version, self.asked = 7, asyncio.Event()

    async def GetTrainer(self, request, context):
        self.asked.set()
        return trainer_pb.GetTrainerResponse(trainer={"weights": {"version": self.version}})

    async def ListEngines(self, request, context):
        await asyncio.wait_for(self.asked.wait(), PATIENCE)
        self.version += 1
        engines = {"of-the-run": (self.version, ""), "of-a-teacher": (99, "teacher")}
        return router_pb.ListEnginesResponse(
            engines=[
                {"engine_id": name, "weights": {"version": version}, "pool": pool}
                for name, (version, pool) in engines.items()
            ]
        )


async def test_no_engine_is_ahead_of_the_trainer_while_a_run_goes_on(tmp_path: Path) -> None:
    run, server = RunGoesOn(), Server(ServerConfig(host="127.0.0.1"))
    server.add(trainer_grpc.add_TrainerServiceServicer_to_server, run, "trainer")
    server.add(router_grpc.add_RouterServiceServicer_to_server, run, "router")
    await server.start()
    try:
        begun(tmp_path, trainer=server.address, router=server.address).__exit__(None, None, None)
        status = await read_status(str(tmp_path), PATIENT)
    finally:
        await server.stop()
    behind = {engine["id"]: engine["versions_behind"] for engine in status["engines"]}
    assert behind == {"of-the-run": 0, "of-a-teacher": None}  # which has weights of its own
    trainer = next(service for service in status["services"] if service["kind"] == "trainer")
    assert trainer["weight_version"] == 8


def test_a_line_of_the_journal_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    for pid in (1, 2):
        RunJournal(tmp_path).write("start", pid=pid)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    RunJournal(tmp_path).write("start", pid=3)
    RunJournal(tmp_path).write("end")
    assert [event.get("pid") for event in read_journal(tmp_path)] == [1, 3, None]


def test_secrets_are_left_out_of_the_journal(tmp_path: Path) -> None:
    settings = {"api_key": "hush", "nested": [{"password": "hush"}], "token_file": "/a/file"}
    RunJournal(tmp_path).start("train", 1, {"environment": settings})
    assert "hush" not in (tmp_path / "journal.jsonl").read_text()
    (start,) = read_journal(tmp_path)
    assert start["config"]["environment"]["token_file"] == "/a/file"
    assert start["versions"]["sluice"]


def test_texts_and_numbers_for_people() -> None:
    assert [duration_text(s) for s in (0, 59.4, 59.6, 7620, 273600)] == [
        "0s",
        "59s",
        "1m00s",
        "2h07m",
        "3d04h",
    ]
    assert plain_text("a\nb\t\0\x1b\u202e\u200b") == "a\\nb\\t" + "\ufffd" * 4
    assert len(plain_text("x" * 5000)) == 200
    assert curve([0.0, None, math.nan, 1.0]) == "▁  █"
    assert curve([]) == "" and curve([2.0, 2.0]) == "▁▁"
    assert [number_text(v) for v in (None, math.nan, 3, 1e-7, 0.25, 1234.5, True)] == [
        "-",
        "nan",
        "3",
        "1.0e-07",
        "0.250",
        "1,234",
        "-",
    ]
    assert seconds_left([], 0, 5) is None
    assert seconds_left([{"step_seconds": 2}, {}, {"step_seconds": "x"}], 7, 5) == 0


async def test_a_terminal_is_drawn_anew_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = begun(tmp_path)
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            raise asyncio.CancelledError
        report.step(row(len(paused)))

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sluice.run_commands.asyncio", SimpleNamespace(sleep=pause))
    with pytest.raises(asyncio.CancelledError):
        await status([str(tmp_path), "--refresh_seconds", "7.5"])
    report.__exit__(None, None, None)
    assert paused == [7.5] * 3
    assert "step 1 of 8" in terminal.getvalue() and "step 2 of 8" in terminal.getvalue()
