"""Spans of a run's trace reach a collector: what is sent is decoded by OpenTelemetry's own protos.

The collector is a real HTTP server, the tracker a real process.
"""

from __future__ import annotations

import gzip
import io
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from pydantic import ValidationError
from rich.console import Console

from sluice.config import ConfigError, parse_config
from sluice.loop.config import RunConfig, SftConfig
from sluice.loop.report import RunReport
from sluice.loop.trace import LOOP, STEP, TRAINER, RunTrace, TraceConfig
from sluice.loop.tracker_settings import OtelConfig, TrackersConfig
from tests.patience import PATIENCE
from tests.unit.loop.test_trace import group_of


class Collector:
    """Takes spans, or answers `code` to them."""

    def __init__(self) -> None:
        self.code, self.spans, self.resources = 200, list[Any](), list[dict[str, str]]()
        self.paths = set[str]()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Encoding"] == "gzip"
                collector.paths.add(self.path)
                if collector.code == 200:
                    collector.take(otlp.ExportTraceServiceRequest.FromString(gzip.decompress(body)))
                self.send_response(collector.code)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # looks often whether it is to end
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def take(self, request: otlp.ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def run(run_dir: Path, steps: range, begin: float = 100.0, **settings: Any) -> str:
    """A run whose trace has these steps of 10 s; what it told."""
    told = io.StringIO()
    otel = {"timeout_seconds": PATIENCE, **settings}
    config = TrackersConfig.model_validate({"otel": otel, "finish_seconds": PATIENCE})
    trace = RunTrace(run_dir, TraceConfig())
    with RunReport(run_dir, 100, Console(file=told, width=1000)) as report:
        report.begin("train", {})
        report.track(config, {})
        report.start_trackers()
        for step in steps:
            at = begin + 10 * (step - 1)
            trace.add_group(group_of(f"g{step}", int(at)))
            trace.add(LOOP, "wait for groups", at, at + 6)
            trace.add(TRAINER, "forward_backward", at + 6, at + 9, "64 rows")
            trace.add(LOOP, STEP, at, at + 10, f"step {step}")
            row = {"step": step, "reward_mean": 0.5, "response_length_mean": 4.0, "skipped": []}
            report.step(row)
            trace.flush(step)  # a little later than the row, as in a run
    return told.getvalue()


def test_a_collector_has_every_span_where_it_belongs(tmp_path: Path, collector: Collector) -> None:
    told = run(tmp_path / "first", range(1, 4), endpoint=collector.url, service_name="policy")
    assert "trackers.otel" not in told
    assert collector.paths == {"/v1/traces"}
    assert {r["service.name"] for r in collector.resources} == {"policy"}
    assert {r["sluice.run"] for r in collector.resources} == {"first"}
    by_id = {span.span_id: span for span in collector.spans}
    assert len(by_id) == len(collector.spans)
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert [(r.name, r.start_time_unix_nano) for r in roots] == [
        ("step", (100 + 10 * n) * 10**9) for n in range(3)
    ]
    assert len({root.trace_id for root in roots}) == 3
    for span in collector.spans:
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            wanted = "group" if "sluice.group" in plain(span.attributes) else "step"
            assert parent.name == (wanted if span.name != "group" else "step")
    told_by_trace = sorted(
        (plain(s.attributes)["sluice.step"], s.name, s.start_time_unix_nano / 1e9)
        for s in collector.spans
        if s.name not in ("step", "group")
    )
    kept = []
    for path in sorted((tmp_path / "first" / "traces").glob("*.arrow")):
        for span in pa.ipc.open_file(path.read_bytes()).read_all().to_pylist():
            if span["name"] != "step":
                kept.append((int(path.stem), span["name"], span["start"]))
    assert told_by_trace == sorted(kept)
    (backward,) = (
        s
        for s in collector.spans
        if s.name == "forward_backward" and s.trace_id == roots[1].trace_id
    )
    assert backward.end_time_unix_nano - backward.start_time_unix_nano == 3 * 10**9
    attributes = plain(backward.attributes)
    assert (attributes["sluice.lane"], attributes["sluice.detail"]) == ("trainer", "64 rows")


def test_a_resumed_run_sends_what_is_new_and_what_was_made_again(
    tmp_path: Path, collector: Collector
) -> None:
    run(tmp_path, range(1, 3), endpoint=collector.url)
    (first,) = {r["sluice.run_id"] for r in collector.resources}
    count = len(collector.spans)
    run(tmp_path, range(2, 4), begin=500.0, endpoint=collector.url)
    starts = [s.start_time_unix_nano // 10**9 for s in collector.spans if s.name == "step"]
    assert starts == [100, 110, 510, 520]
    assert len(collector.spans) == 2 * count
    assert {r["sluice.run_id"] for r in collector.resources} == {first}
    run(tmp_path, range(0), endpoint=collector.url)
    assert len(collector.spans) == 2 * count


def test_a_collector_that_fails_stops_no_run_and_gets_all_later(
    tmp_path: Path, collector: Collector
) -> None:
    collector.code = 400  # which is not tried again within the call
    told = run(tmp_path, range(1, 4), endpoint=collector.url)
    assert "trackers.otel: " in told and "were not taken" in told
    assert [len((tmp_path / "metrics.jsonl").read_text().splitlines()), collector.spans] == [3, []]
    collector.code = 200
    run(tmp_path, range(4, 5), endpoint=collector.url)
    assert sum(span.name == "step" for span in collector.spans) == 4


def test_nobody_at_the_endpoint_stops_no_run(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        told = run(tmp_path, range(1, 3), endpoint=url, timeout_seconds=0.5)
    assert "trackers.otel: " in told
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_samples_stay_at_home_where_they_are_not_wanted(
    tmp_path: Path, collector: Collector
) -> None:
    run(tmp_path, range(1, 2), endpoint=f"{collector.url}/other/path", samples=False)
    assert sorted(span.name for span in collector.spans) == [
        "forward_backward",
        "step",
        "wait for groups",
    ]
    assert collector.paths == {"/other/path"}


def test_a_damaged_step_is_left_out(tmp_path: Path, collector: Collector) -> None:
    told = run(tmp_path, range(1, 3), endpoint=collector.url)
    path = tmp_path / "traces" / "0000001.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "trackers" / "otel.sent.json").write_text('{"sent": 3}')  # damaged: all again
    collector.spans.clear()
    told += run(tmp_path, range(0), endpoint=collector.url)
    assert "trackers.otel" not in told
    assert [plain(s.attributes)["sluice.step"] for s in collector.spans if s.name == "step"] == [2]


def sluice_trace(run_dir: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "sluice.cli", "trace", str(run_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_has_ended_is_sent_by_hand_as_often_as_wanted(
    tmp_path: Path, collector: Collector
) -> None:
    run(tmp_path, range(1, 4), endpoint=collector.url)
    ids = {(span.trace_id, span.span_id) for span in collector.spans}
    collector.spans.clear()
    code, told = sluice_trace(tmp_path, "--otlp", collector.url)
    assert (code, told) == (0, f"{collector.url}/v1/traces: 3 steps\n")
    assert {(span.trace_id, span.span_id) for span in collector.spans} == ids  # the same ones
    collector.spans.clear()
    assert sluice_trace(tmp_path, "--otlp", collector.url, "--steps", "2-3")[0] == 0
    found = [plain(s.attributes)["sluice.step"] for s in collector.spans if s.name == "step"]
    assert found == [2, 3]


def test_a_run_without_a_tracker_is_sent_by_hand_too(tmp_path: Path, collector: Collector) -> None:
    with RunReport(tmp_path, 2, Console(file=io.StringIO())) as report:
        report.begin("train", {})
    trace = RunTrace(tmp_path, TraceConfig())
    for step in (1, 2):
        trace.add(LOOP, STEP, step, step + 1, f"step {step}")
        trace.flush(step)
    path = tmp_path / "traces" / "0000001.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    for _ in range(2):
        code, told = sluice_trace(tmp_path, "--otlp", collector.url)
        assert code == 0
        assert told.splitlines() == [
            "damaged and left out: steps 1",
            f"{collector.url}/v1/traces: 1 steps",
        ]
    assert len(collector.spans) == 2
    assert len({(span.trace_id, span.span_id) for span in collector.spans}) == 1
    (run_id,) = {r["sluice.run_id"] for r in collector.resources}
    assert len(run_id) == 32


def test_what_cannot_be_sent_by_hand_is_said(tmp_path: Path, collector: Collector) -> None:
    run(tmp_path, range(1, 2), endpoint=collector.url)
    for flags, wanted in (
        (["--otlp", "collector:4318"], "--otlp: endpoint:"),
        (["--otlp", collector.url, "--steps", "7"], "none of these steps"),
        (["--otlp", collector.url, "-o", "x.html"], "leave -o out"),
        (["--otlp"], "--otlp needs a value"),
    ):
        code, told = sluice_trace(tmp_path, *flags)
        assert (code, told.count("\n")) == (2, 1), told
        assert wanted in told
    collector.code = 400
    code, told = sluice_trace(tmp_path, "--otlp", collector.url)
    assert code == 2
    assert "the spans of step 1 were not taken" in told.splitlines()[-1]
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"endpoint": ""},
        {"endpoint": "collector:4318"},
        {"endpoint": "ftp://collector"},
        {"endpoint": "http://"},
        {"endpoint": "http://a b"},
        {"endpoint": "http://" + "x" * 5000},
        {"endpoint": "http://c", "timeout_seconds": float("nan")},
        {"endpoint": "http://c", "headers": {}},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OtelConfig.model_validate(settings)


def test_a_run_without_a_trace_refuses_to_export_one(tmp_path: Path) -> None:
    otel = {"otel": {"endpoint": "http://127.0.0.1:4318"}}
    run = {
        "run_dir": tmp_path,
        "services": tmp_path / "services.json",
        "prompts": {"index_count": 1},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 1},
        "trackers": otel,
    }
    endpoint = parse_config(RunConfig, run).trackers.otel
    assert endpoint is not None and endpoint.endpoint == "http://127.0.0.1:4318/v1/traces"
    with pytest.raises(ConfigError, match=r"trace\.steps 0"):
        parse_config(RunConfig, {**run, "trace": {"steps": 0}})
    sft = {
        "run_dir": tmp_path,
        "trainer": "t:1",
        "tokenizer": tmp_path,
        "rows": {"file": "x.jsonl"},
    }
    with pytest.raises(ConfigError, match="keeps no trace"):
        parse_config(SftConfig, {**sft, "trackers": otel})
