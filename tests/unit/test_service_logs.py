"""Logs of several processes: in order of time, whole, bounded, and as they come."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.config import ConfigError
from sluice.durable import owned
from sluice.service_logs import LONGEST_LINE, FileLog, file_logs, merged, since_time
from tests.patience import PATIENCE


def at(second: int, text: str) -> str:
    return f"2026-01-31 12:00:{second:02},000 INFO x [-] {text}\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two services and a rank, whose lines come in turns."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").write_text(at(1, "one") + at(3, "three") + "  trace\n")
    (tmp_path / "logs" / "trainer.log").write_text("early\n" + at(2, "two") + at(4, "four"))
    (tmp_path / "logs" / "trainer-rank0.log").write_text(at(5, "five"))
    return tmp_path


def logs(*arguments: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sluice.cli", "logs", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,  # type: ignore[call-overload]
    )


def words(output: str) -> list[str]:
    return [line.split()[-1] for line in output.splitlines()]


def test_lines_come_by_time_with_their_service(run_dir: Path) -> None:
    found = list(merged(file_logs(run_dir / "logs").values(), float("-inf")))
    assert [line.text.split()[-1] for line in found] == [
        "early",
        "one",
        "two",
        "three",
        "trace",
        "four",
        "five",
    ]
    assert [line.name for line in found][:4] == ["trainer", "router", "trainer", "router"]


def test_a_service_is_named_with_all_its_processes(run_dir: Path) -> None:
    assert set(file_logs(run_dir / "logs", ["trainer"])) == {"trainer", "trainer-rank0"}
    assert set(file_logs(run_dir / "logs", ["trainer-rank0"])) == {"trainer-rank0"}
    for name in ("train", "../logs/router", "n\0ul", "x" * 5000, ""):
        with pytest.raises(ConfigError, match="there are router, trainer, trainer-rank0"):
            file_logs(run_dir / "logs", [name])


def test_files_that_were_turned_come_first(run_dir: Path) -> None:
    path = run_dir / "logs" / "router.log"
    path.with_name("router.log.1").write_text(at(0, "newer"))
    with gzip.open(path.with_name("router.log.10.gz"), "wb") as file:
        file.write(at(0, "oldest").encode())
    with gzip.open(path.with_name("router.log.9.gz"), "wb") as file:
        file.write(at(0, "damaged").encode())
    damaged = path.with_name("router.log.9.gz")
    damaged.write_bytes(damaged.read_bytes()[:-5])
    found = [line.text for line in merged([FileLog("router", path)], float("-inf"))]
    assert found[0] == at(0, "oldest").rstrip()
    assert "router.log.9.gz" in " ".join(found[:3])
    assert found[-4:] == [
        at(0, "newer").rstrip(),
        at(1, "one").rstrip(),
        at(3, "three").rstrip(),
        "  trace",
    ]


def test_a_log_goes_on_where_it_was_turned_or_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntw")
    log = FileLog("a", path)

    def now() -> list[str]:
        return [line.text for line in iter_all(log)]

    assert now() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert now() == ["two"]
    with path.open("a") as file:
        file.write("last\n")
    path.rename(tmp_path / "a.log.1")  # as logrotate does
    assert now() == ["last"]
    path.write_text("new\n")
    assert now() == ["new"]
    path.write_text("n\n")  # as logrotate's copytruncate does
    assert now() == ["n"]
    path.unlink()
    assert now() == []


def iter_all(log: FileLog) -> Iterator:
    while lines := log.lines():
        yield from lines


def test_a_line_without_an_end_takes_no_memory_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (5 * LONGEST_LINE + 1) + b"\xff\n")
    found = list(merged([FileLog("a", path)], float("-inf")))
    assert max(len(line.text) for line in found) == LONGEST_LINE
    assert sum(len(line.text) for line in found) == 5 * LONGEST_LINE + 2


@pytest.mark.parametrize(
    "text", ["-1m", "10", "nan", "1e9d", "10 m", "yesterday", "2026-13-01 00:00:00", "m" * 5000]
)
def test_a_span_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        since_time(text)


def test_since_is_a_span_or_a_time() -> None:
    assert since_time("") == float("-inf")
    assert since_time("1.5m", now=1000.0) == 910.0
    assert since_time("999999999d", now=0.0) < -1e13
    assert since_time("2026-01-31 12:00:03") - since_time("2026-01-31T12:00:01,500") == 1.5


def test_the_command_prints_and_ends(run_dir: Path) -> None:
    output, _ = logs(run_dir, "--since", "2026-01-31 12:00:03").communicate(timeout=PATIENCE)
    assert words(output) == ["three", "trace", "four", "five"]
    assert output.splitlines()[0].startswith("router        | 2026-01-31 12:00:03")


def test_what_was_logged_cannot_steer_a_terminal(run_dir: Path) -> None:
    (run_dir / "logs" / "router.log").write_bytes(b"\x1b[2J\ttab\r\n")
    output, _ = logs(run_dir, "router").communicate(timeout=PATIENCE)
    assert output == "router | \\x1b[2J\ttab\n"
    (run_dir / "logs" / "a\x1b[2J\udcff.log").write_bytes(b"said\n")
    output, _ = logs(run_dir).communicate(timeout=PATIENCE)
    assert "a\\x1b[2J\\udcff" in output and "\x1b" not in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{}/nowhere"], "nowhere/logs is not here"),
        (["{}", "--sinc", "1m"], "unknown flag --sinc"),
        (["{}", "--since"], "--since needs a value"),
        (["{}", "nobody"], "no log of 'nobody'"),
        (["x" * 5000], "File name too long"),
    ],
)
def test_what_cannot_be_is_one_line(run_dir: Path, arguments: list[str], told: str) -> None:
    process = logs(*(argument.format(run_dir) for argument in arguments))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert told in errors
    assert len(errors.splitlines()) == 1


def test_following_shows_what_comes_and_ends_with_the_services(run_dir: Path) -> None:
    with owned(run_dir, "up"):
        process = logs(run_dir, "--follow", bufsize=1)
        assert process.stdout is not None
        read = [process.stdout.readline() for _ in range(7)]
        assert words("".join(read))[-1] == "five"
        with (run_dir / "logs" / "router.log").open("a") as file:
            file.write(at(9, "nine"))
        assert process.stdout.readline().endswith("nine\n")
        (run_dir / "logs" / "later.log").write_text(at(10, "ten"))
        assert process.stdout.readline().endswith("ten\n")
        assert process.poll() is None
        with (run_dir / "logs" / "router.log").open("a") as file:
            file.write("without an end")
    output, errors = process.communicate(timeout=PATIENCE)
    assert (output, errors) == ("router        | without an end\n", "")
    assert process.returncode == 0


def test_ctrl_c_and_a_closed_pipe_end_it_without_a_word(run_dir: Path) -> None:
    with owned(run_dir, "up"):
        process = logs(run_dir, "--follow")
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (130, "")

        process = logs(run_dir, "--follow")
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            with (run_dir / "logs" / "router.log").open("a") as file:
                file.write(at(9, "more"))
            assert time.monotonic() < deadline
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, "")
    os.truncate(run_dir / "logs" / "router.log", 0)
