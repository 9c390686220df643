"""Dashboards and alert rules name metrics and labels that are exposed, and all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge

from services.trainer import metrics as trainer
from sluice.loop import metrics as loop
from tools import dashboards
from tools.dashboards import DIRECTORY, NODE, PROCESS, PROMETHEUS, RULES
from tools.declared_metrics import MODULES, Declared, declared

EXPOSED: dict[str, Declared] = {
    metric.name: metric for service in MODULES for metric in declared(service)
}
FOREIGN = {**NODE, **PROCESS, **PROMETHEUS}
TARGET = {"instance", "job"}
WORDS = {  # of PromQL, as far as it is used here
    *("by", "sum", "avg", "max", "rate", "increase", "deriv", "changes", "scalar", "time"),
    *("histogram_quantile", "and", "or", "m"),
}
BOARDS = {path.stem: json.loads(path.read_text()) for path in DIRECTORY.glob("dashboards/*.json")}
PANELS = [
    (name, panel)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if "targets" in panel
]
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]


def selected(expr: str) -> list[tuple[str, set[str]]]:
    """Every metric that an expression names, and the labels it names beside it."""
    found = []
    bare = re.sub(r'"[^"]*"|\'[^\']*\'', '""', expr)
    grouped = {label for part in re.findall(r"by \(([^)]*)\)", bare) for label in part.split(", ")}
    bare = re.sub(r"by \([^)]*\)|\[[^]]*\]", "", bare)
    for name, _, conditions in re.findall(r"([a-zA-Z_:][\w:]*)(\{([^}]*)\})?", bare):
        if name not in WORDS:
            labels = set(re.findall(r"(\w+)\s*[!=]", conditions))
            found.append((name, labels | grouped))
    return found


def check(expr: str) -> None:
    names = selected(expr)
    assert names, expr
    for name, labels in names:
        if name in FOREIGN:
            assert labels <= TARGET | set(FOREIGN[name]), (name, labels)
            continue
        metric = EXPOSED.get(re.sub("_(bucket|sum|count)$", "", name)) or EXPOSED.get(name)
        assert metric is not None, f"{name} is exposed by nobody"
        is_part = name != metric.name
        assert is_part == (metric.kind == "histogram"), name
        known = {*metric.labels, *(["le"] if name.endswith("_bucket") else [])}
        assert labels <= TARGET | known, (name, labels)


@pytest.mark.parametrize("name, panel", PANELS, ids=lambda value: str(value)[:40])
def test_every_query_asks_for_what_is_exposed(name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        check(target["expr"])
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            metrics = [
                EXPOSED.get(re.sub("_(bucket|sum|count)$", "", n))
                for n, _ in selected(target["expr"])
            ]
            labels = {label for metric in metrics if metric for label in metric.labels}
            foreign = {own for n, _ in selected(target["expr"]) for own in FOREIGN.get(n, ())}
            assert label in TARGET | labels | foreign, target


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_rule_asks_for_what_is_exposed_and_says_what_to_do(alert: dict[str, Any]) -> None:
    check(alert["expr"])
    assert alert["annotations"]["summary"] and alert["annotations"]["remedy"]
    assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("expr", ["sluice_trainer_nonesuch", 'sluice_loop_step{pool="a"}'])
def test_the_check_finds_a_wrong_name_and_a_wrong_label(expr: str) -> None:
    with pytest.raises(AssertionError):
        check(expr)


def test_every_metric_of_a_service_is_on_its_dashboard() -> None:
    boards = {"trainer": "trainer", "rollout": "engines", "router": "router"}
    boards |= {"reward_model": "reward-model", "gateway": "gateway"}
    boards |= {"converter": "converter", "loop": "run", "": ("run", "host")}  # type: ignore[dict-item]
    for service, names in boards.items():
        shown = {
            re.sub("_(bucket|sum|count)$", "", name)
            for board in ([names] if isinstance(names, str) else names)
            for panel in BOARDS[board]["panels"]
            for target in panel.get("targets", ())
            for name, _ in selected(target["expr"])
        }
        assert {metric.name for metric in declared(service)} <= shown


def test_dashboards_fit_on_the_grid_and_are_told_apart() -> None:
    assert set(BOARDS) == {
        "run",
        "trainer",
        "engines",
        "router",
        "reward-model",
        "converter",
        "gateway",
        "host",
    }
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            own = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not own & taken and max(x for x, _ in own) < 24
            taken |= own
        for key in ("id", "title"):
            assert len({panel[key] for panel in board["panels"]}) == len(board["panels"])


def test_what_is_written_is_what_the_code_declares(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards.main(["--check"]) == 0, capsys.readouterr().err


def test_a_renamed_metric_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = Gauge("sluice_loop_step_number", "Another name.", registry=None)
    monkeypatch.setattr(loop, "STEP", renamed)
    assert dashboards.main(["--check"]) == 1
    monkeypatch.undo()
    restarts = Counter("sluice_trainer_rank_starts_total", "Another name.", registry=None)
    monkeypatch.setattr(trainer, "RESTARTS", restarts)
    assert dashboards.main(["--check"]) == 1
    assert "deploy/observability/rules/sluice.yml is not" in capsys.readouterr().err


def test_every_rule_has_a_case_in_which_it_is_quiet_fires_and_clears() -> None:
    cases = yaml.safe_load(Path(DIRECTORY / "alerts.test.yml").read_text())["tests"]
    states: dict[str, list[bool]] = {}
    for case in cases:
        for each in case["alert_rule_test"]:
            states.setdefault(each["alertname"], []).append(bool(each["exp_alerts"]))
    assert states == {alert["alert"]: [False, True, False] for alert in ALERTS}
