"""Trackers show every step once, whatever happens to the run, and what happens to them stops none.

The processes are real. TensorBoard is the real package; where a package has to fail, a stand-in of
its name does.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from rich.console import Console

from sluice.config import ConfigError, parse_config
from sluice.loop import tracking
from sluice.loop.config import RunConfig
from sluice.loop.journal import without_secrets
from sluice.loop.ledger import Ledger
from sluice.loop.report import RunReport
from sluice.loop.run_directory import LEDGER, notice_copy
from sluice.loop.tracker_settings import TrackersConfig
from sluice.loop.trackers import NOT_TRACKED, values_of
from sluice.loop.tracking import RowFollower, TrackedRows
from tests.patience import PATIENCE

STAND_IN = """
import json, os, time
PLACE = os.environ["STAND_IN"]
class Run:
    def __init__(self, id): self.id = id
    def define_metric(self, *_, **__): pass
    def log(self, values):
        mode = open(PLACE + "/mode").read()
        if mode == "hang":
            open(PLACE + "/hangs", "w").close()
            time.sleep(10_000)
        if mode == "raise" or (mode == "third" and values["step"] == 3):
            raise RuntimeError("503 from a server")
        if mode == "exit":
            os._exit(3)
        with open(PLACE + "/logged", "a") as file:
            file.write(json.dumps({**values, "run": self.id}) + "\\n")
    def finish(self, exit_code): open(PLACE + "/finished", "w").write(str(exit_code))
def init(id, config, **options):
    if open(PLACE + "/mode").read() == "no start": raise ConnectionError("no route")
    with open(PLACE + "/config", "w") as file: json.dump(config, file)
    with open(PLACE + "/options", "w") as file: json.dump(options, file)
    return Run(id)
"""


class Place:
    """A run directory, and a package that stands in for wandb."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.directory = directory / "run", directory
        (directory / "packages").mkdir()
        (directory / "packages" / "wandb.py").write_text(STAND_IN)
        monkeypatch.setenv("STAND_IN", str(directory))
        path = os.pathsep.join([str(directory / "packages"), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.syspath_prepend(str(directory / "packages"))
        monkeypatch.setattr(tracking, "PAUSES", (0.01,))
        self.behave("ok")

    def behave(self, mode: str) -> None:
        (self.directory / "mode").write_text(mode)

    @property
    def steps(self) -> list[int]:
        return [step for steps in self.steps_by_run.values() for step in steps]

    @property
    def steps_by_run(self) -> dict[str, list[int]]:
        path = self.directory / "logged"
        found: dict[str, list[int]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            values = json.loads(line)
            found.setdefault(values["run"], []).append(values["step"])
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward_mean": step / 10,
        "response_length_mean": 4.0,
        "loss": float("nan"),
        "skipped": ["not finite"] if step == 2 else [],
        **more,
    }


def score(step: int) -> dict[str, Any]:
    facts = {"evaluation": "during", "dataset": "held_out", "score_error": None, "failed_groups": 0}
    return {**facts, "step": step, "score": 0.5, "pass@4": 0.7, "version_min": 1, "version_max": 1}


def track(
    run_dir: Path, steps: range, config: dict[str, Any], *, back_to: int | None = None
) -> tuple[str, float]:
    """A run of these steps; what it told, and the seconds that its end took."""
    told = io.StringIO()
    trackers = parse_trackers(config)
    report = RunReport(run_dir, 100, Console(file=told, width=1000))
    with report:
        report.begin("train", {})
        report.track(trackers, {"seed": 1, "api_key": "hush"})
        report.start_trackers()
        if back_to is not None:
            report.truncate(back_to)
        for step in steps:
            report.step(row(step))
        if len(steps) > 2:
            report.evaluation(score(steps[1]))  # which took a step longer
        began = time.monotonic()
    return told.getvalue(), time.monotonic() - began


def begin_as_a_run_does(run_dir: Path) -> None:
    with closing(Ledger(run_dir / LEDGER)) as ledger:
        notice_copy(run_dir, ledger)


def parse_trackers(config: dict[str, Any]) -> TrackersConfig:
    return TrackersConfig.model_validate(config)


def failures() -> float:
    name = "sluice_loop_tracker_failures_total"
    return REGISTRY.get_sample_value(name, {"tracker": "wandb"}) or 0.0


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    read = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }


def test_tensorboard_reads_what_the_run_wrote_and_each_step_once(tmp_path: Path) -> None:
    config = {"tensorboard": {}, "finish_seconds": PATIENCE}
    told, _ = track(tmp_path, range(1, 6), config)
    assert "trackers" not in told
    track(tmp_path, range(4, 9), config, back_to=3)  # resumed: 4 and 5 are made again
    found = scalars(tmp_path / "tensorboard")
    assert [step for step, _ in found["reward_mean"]] == list(range(1, 9))
    assert found["reward_mean"][6] == (7, pytest.approx(0.7))
    assert found["skipped"][1] == (2, 1.0)
    assert found["eval/held_out/pass@4"] == [(2, pytest.approx(0.7)), (5, pytest.approx(0.7))]
    assert "loss" not in found  # it never was a number


def test_a_tracker_gets_settings_without_secrets_and_rows_from_before_it(place: Place) -> None:
    track(place.run_dir, range(1, 4), {})  # a run without
    track(place.run_dir, range(4, 6), {"wandb": {}, "finish_seconds": PATIENCE}, back_to=3)
    assert place.steps == [1, 2, 3, 2, 4, 5]  # the second 2 is an evaluation
    config = json.loads((place.directory / "config").read_text())
    assert config == {"seed": 1, "api_key": "(left out)"}
    assert (place.directory / "finished").read_text() == "0"


def test_a_copy_of_a_run_is_another_run_there_with_all_of_its_rows(place: Place) -> None:
    config = {"wandb": {"name": "n"}, "tensorboard": {}, "finish_seconds": PATIENCE}
    begin_as_a_run_does(place.run_dir)
    track(place.run_dir, range(1, 4), config)
    copied = place.run_dir.with_name("copied")
    shutil.copytree(place.run_dir, copied)
    begin_as_a_run_does(copied)
    track(copied, range(4, 6), config, back_to=3)
    options = json.loads((place.directory / "options").read_text())
    assert re.fullmatch("n-[0-9a-f]{6}", options["name"])
    begin_as_a_run_does(copied)
    track(copied, range(6, 7), config, back_to=5)  # resumed, it is that other run
    assert json.loads((place.directory / "options").read_text())["name"] == options["name"]
    begin_as_a_run_does(place.run_dir)
    track(place.run_dir, range(4, 5), config, back_to=3)
    first, second = place.steps_by_run.values()
    assert (sorted(first), sorted(second)) == ([1, 2, 2, 3, 4], [1, 2, 2, 3, 4, 5, 6])
    for run_dir, last in ((place.run_dir, 4), (copied, 6)):  # whose event files went along
        found = scalars(run_dir / "tensorboard")["reward_mean"]
        assert [step for step, _ in found] == list(range(1, last + 1))


def test_a_copy_of_a_run_leaves_event_files_elsewhere_alone(tmp_path: Path) -> None:
    events, config = tmp_path / "events", {"directory": str(tmp_path / "events")}
    trackers = {"tensorboard": config, "finish_seconds": PATIENCE}
    begin_as_a_run_does(tmp_path / "run")
    track(tmp_path / "run", range(1, 4), trackers)
    (before,) = events.iterdir()
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    begin_as_a_run_does(tmp_path / "copied")
    track(tmp_path / "copied", range(4, 6), trackers, back_to=3)
    (own,) = set(events.iterdir()) - {before}
    assert re.fullmatch("copied-[0-9a-f]{6}", own.name)
    assert [step for step, _ in scalars(own)["reward_mean"]] == [1, 2, 3, 4, 5]


def test_a_run_of_wandb_is_whose_and_what_the_settings_say(place: Place) -> None:
    said = {"project": "p", "entity": "team", "name": "n", "group": "g", "tags": ["a", "b"]}
    track(place.run_dir, range(1, 2), {"wandb": said, "finish_seconds": PATIENCE})
    options = json.loads((place.directory / "options").read_text())
    assert {key: options[key] for key in said} == said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pass@word@host:5000/x", "https://me:(left out)@host:5000/x"),
        ("https://:pass@host", "https://:(left out)@host"),
        ("https://me@host:5000/x?a=b:c@d", "https://me@host:5000/x?a=b:c@d"),
        ("file:///a:b@c", "file:///a:b@c"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("host:5000", "host:5000"),
    ],
)
def test_passwords_of_urls_are_left_out(url: str, shown: str) -> None:
    assert without_secrets({"a": [{"uri": url}]}) == {"a": [{"uri": shown}]}


def test_one_that_hangs_holds_nothing_and_gets_the_rest_when_resumed(place: Place) -> None:
    place.behave("hang")
    before = failures()
    told, seconds = track(place.run_dir, range(1, 6), {"wandb": {}, "finish_seconds": 0.5})
    assert seconds < PATIENCE / 10
    assert "trackers.wandb: did not end in time and was ended" in told
    assert failures() == before + 1
    assert place.steps == []
    place.behave("ok")
    track(place.run_dir, range(6, 8), {"wandb": {}, "finish_seconds": PATIENCE}, back_to=5)
    assert sorted(place.steps) == [1, 2, 2, 3, 4, 5, 6, 7]


def test_one_that_is_silent_for_long_is_told_of_while_the_run_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "QUIET_SECONDS", 0.05)
    place.behave("hang")
    told = io.StringIO()
    with RunReport(place.run_dir, 100, Console(file=told, width=1000)) as report:
        report.begin("train", {})
        report.track(parse_trackers({"wandb": {}, "finish_seconds": 0.1}), {})
        report.start_trackers()
        report.step(row(1))
        deadline = time.monotonic() + PATIENCE
        while "has not answered" not in told.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        report.step(row(2))
    assert told.getvalue().count("has not answered") == 1


@pytest.mark.parametrize("mode, why", [("raise", "503 from a server"), ("no start", "no route")])
def test_one_that_raises_is_told_and_stops_nothing(place: Place, mode: str, why: str) -> None:
    place.behave(mode)
    before = failures()
    told, _ = track(place.run_dir, range(1, 4), {"wandb": {}, "finish_seconds": PATIENCE})
    assert f"trackers.wandb: {'start' if mode == 'no start' else 'step 1'}" in told
    assert why in told
    assert failures() > before
    assert place.steps == []


def test_one_row_that_is_refused_leaves_the_others(place: Place) -> None:
    place.behave("third")
    told, _ = track(place.run_dir, range(1, 6), {"wandb": {}, "finish_seconds": PATIENCE})
    assert place.steps == [1, 2, 4, 5, 2]
    assert "step 3: RuntimeError: 503" in told


def test_one_that_dies_is_told_of(place: Place) -> None:
    place.behave("exit")
    told, _ = track(place.run_dir, range(1, 4), {"wandb": {}, "finish_seconds": PATIENCE})
    assert place.steps == []
    log = place.run_dir / "trackers" / "wandb.log"
    assert log.exists() and told.count(f"see {log}") == 1
    place.behave("ok")
    track(place.run_dir, range(4, 5), {"wandb": {}, "finish_seconds": PATIENCE}, back_to=3)
    assert sorted(place.steps) == [1, 2, 2, 3, 4]


def test_a_run_that_fails_is_one_that_failed(place: Place) -> None:
    config = parse_trackers({"wandb": {}, "finish_seconds": PATIENCE})
    with (
        pytest.raises(ZeroDivisionError),
        RunReport(place.run_dir, 9, Console(file=io.StringIO())) as report,
    ):
        report.begin("train", {})
        report.track(config, {})
        report.start_trackers()
        raise ZeroDivisionError
    assert (place.directory / "finished").read_text() == "1"


@pytest.mark.parametrize(
    "trackers, why",
    [
        ({"weights_and_biases": {}}, "trackers.weights_and_biases"),
        ({"wandb": {"mode": "sometimes"}}, "trackers.wandb.mode"),
        ({"mlflow": {}}, "trackers.mlflow.uri"),
        ({"wandb": {"project": ""}}, "trackers.wandb.project"),
        ({"finish_seconds": -1}, "trackers.finish_seconds"),
        ({"finish_seconds": float("nan")}, "trackers.finish_seconds"),
    ],
)
def test_unknown_trackers_and_settings_are_refused(trackers: dict[str, Any], why: str) -> None:
    config = {
        "run_dir": "x",
        "services": "s.json",
        "prompts": {"index_count": 1},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 1},
        "trackers": trackers,
    }
    with pytest.raises(ConfigError, match=why.replace(".", r"\.")):
        parse_config(RunConfig, config)


def test_a_package_that_is_missing_is_named_before_the_run(tmp_path: Path) -> None:
    assert "trackio" not in sys.modules
    report = RunReport(tmp_path, 1, Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match=r"trackers\.trackio: .*sluice\[trackio\]"):
        report.track(parse_trackers({"trackio": {}}), {})
        report.start_trackers()


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
    )
)
@example(found={"evaluation": None})  # a damaged line: of which data set it does not say
def test_values_are_the_finite_numbers(found: dict[str, Any]) -> None:
    found.pop("dataset", None)
    values = values_of({**found, "step": 3, "time": 1.0})
    assert "step" not in values and "time" not in values
    for key, value in values.items():
        wanted = found[key]
        assert value == float(len(wanted) if isinstance(wanted, list) else wanted)
        assert key == "skipped" or not isinstance(wanted, list)
    kept = {key for key, value in found.items() if type(value) in (int, float)}
    assert {key for key in kept if abs(found[key]) < 1e300} - set(NOT_TRACKED) <= values.keys()


def test_lines_that_are_cut_or_damaged_are_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = RowFollower(path)
    assert follower.new() == []
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert [r["step"] for r in follower.new()] == [1]
    with path.open("ab") as file:
        file.write(b'p": 2}\n\xff\xfe\n[1]\n{"step": true}\n{"step": "3"}\n{"step": 4}\n')
    assert [r["step"] for r in follower.new()] == [2, 4]
    path.with_suffix(".new").write_bytes(b'{"step": 1}\n{"step": 9}\n')
    path.with_suffix(".new").replace(path)
    assert [r["step"] for r in follower.new()] == [1, 9]


def test_what_a_tracker_has_is_written_as_it_comes(tmp_path: Path) -> None:
    """However many evaluations came before: a long run may have one for each step."""
    path, scored = tmp_path / "wandb.json", {"evaluation": "during", "dataset": "held out"}
    lines = tmp_path / "wandb.evaluations.jsonl"
    rows = TrackedRows(path)
    rows.run_id = "r"
    written = list[int]()
    for step in range(1, 201):
        before = lines.stat().st_size if lines.exists() else 0
        rows.add({"step": step})
        rows.add({"step": step, **scored})
        written.append(path.stat().st_size + lines.stat().st_size - before)
    assert max(written) < 2 * written[0]
    with lines.open("a") as file:
        file.write('\n["during", "held o')  # a crash
    again = TrackedRows(path)
    assert again.run_id == "r"
    again.add({"step": 300, **scored})
    known = TrackedRows(path)
    for step in (1, 200, 201, 300):
        assert known.has({"step": step}) is (step <= 200)
        assert known.has({"step": step, **scored}) is (step != 201)
    path.write_text("{")
    assert not TrackedRows(path).has({"step": 1, **scored})
    assert not lines.exists()


def test_what_an_earlier_release_kept_of_evaluations_stays(tmp_path: Path) -> None:
    path, scored = tmp_path / "wandb.json", {"evaluation": "during", "dataset": "held out"}
    kept = {"run_id": "r", "step": 3, "evaluations": [["during", "held out", 2]]}
    path.write_text(json.dumps(kept))
    TrackedRows(path).add({"step": 4})
    rows = TrackedRows(path)
    assert [rows.has({"step": step, **scored}) for step in (2, 3)] == [True, False]
    assert rows.has({"step": 4})
