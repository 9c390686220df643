"""A run under the real Prometheus: every panel of every dashboard has data, every alert is tested.

Needs `prometheus`, `promtool` and `prometheus-node-exporter` (Debian: apt-get install prometheus
prometheus-node-exporter). Services run under TLS and a token, as they are deployed; work that a
plain run does not have (transfers, conversions, an OpenAI client) is done for real. The last line
of its output is `observability: panels=<n> with_data=<n> alerts=<n> tested=<n>`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from examples.demo import write_prompts
from sluice.api.trainer.v1.trainer_service_pb2 import TransferTarget
from sluice.client import TrainerClient
from sluice.ports import free_port
from sluice.runtime.security import SecurityConfig
from tools.dashboards import DIRECTORY, RULES, Dashboard, Panel, alerts, dashboards
from tools.make_certificates import Authority

T = TypeVar("T")

PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")
PATIENCE = 600.0  # seconds, for anything on a busy machine
SCRAPE_SECONDS = 1
WINDOW = f"{10 * SCRAPE_SECONDS}s"  # for Grafana's $__rate_interval
STEPS, SENT_STEPS = 96, 24  # seconds of scrapes, on a fast machine too
LIMIT = 11_000  # points of a query that Prometheus gives
TESTS = DIRECTORY / "alerts.test.yml"


class CheckError(Exception):
    """What should be there is not; the message says what, and ends with a log where one tells."""


def wait_until(what: str, found: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """The first result that is not None. Raises CheckError."""
    end = time.monotonic() + seconds
    while (result := found()) is None:
        if time.monotonic() > end:
            raise CheckError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return result


@dataclass
class Scene:
    """Directory, certificates and processes of a check."""

    directory: Path
    processes: ExitStack = field(default_factory=ExitStack)

    @property
    def security(self) -> dict[str, Any]:
        places = {use: str(self.directory / f"host.{end}") for use, end in _PEM.items()}
        tls = {**places, "ca": str(self.directory / "ca.pem")}
        return {"tls": tls, "token_file": str(self.directory / "token")}

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def reward_model(self) -> Path:
        return self.directory / "reward-model"

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads(
            (self.directory / "services.json").read_text()
        )
        return found

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process that ends with the scene."""
        log = self.processes.enter_context((self.directory / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.processes.callback(_end, process)
        return process

    def run(self, name: str, command: Sequence[str]) -> None:
        """A process that ends well, or CheckError."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as file:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=PATIENCE, check=False)
        if done.returncode:
            raise CheckError(f"{name} ended with {done.returncode}:\n{log.read_text()[-4000:]}")

    def write(self, name: str, content: dict[str, Any]) -> str:
        path = self.directory / name
        path.write_text(yaml.safe_dump(content))
        return str(path)


_PEM = {"cert": "pem", "key": "key"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def prepare(scene: Scene) -> None:
    """Certificates, token, model and prompts."""
    authority = Authority()
    authority.write(scene.directory / "ca.pem")
    authority.issue(scene.directory, "host")
    (scene.directory / "token").write_text("a token for a trial\n")
    build = [sys.executable, "-m", "sluice.demo.tiny_qwen3", str(scene.model), "0"]
    scene.run("model", build)
    head = [sys.executable, "-m", "examples.models.value_head", str(scene.model)]
    scene.run("reward-model", [*head, str(scene.reward_model)])
    write_prompts(scene.directory / "prompts.jsonl", 0)


def start_services(scene: Scene) -> None:
    """One process of each kind, that stores deltas and can send weights; and a trainer that
    writes its own behind."""
    trainer = {
        "model": str(scene.model),
        "optim": {"learning_rate": 2e-3},
        "publish": {"delta": True, "chain": 3},
        "transfer": {"enabled": True},
    }
    behind = {
        "model": str(scene.model),
        "weights": str(scene.directory / "behind"),
        "transfer": {"enabled": True, "write_behind": True},
    }
    rollout = {
        "tokenizer": str(scene.model),
        "weights_cache": str(scene.directory / "cache"),
        # fewer places than a step has samples, so that some wait at the router
        "engine": {"max_running": 48, "max_model_length": 16, "threads": 1},
        "openai": {"model_name": "policy"},
    }
    gateway = {"model": str(scene.model)}
    up = {
        "run_dir": str(scene.directory),
        "security": scene.security,
        "start_timeout_seconds": PATIENCE,
        "services": {
            "router": {"kind": "router"},
            "converter": {"kind": "converter"},
            "scores": {"kind": "reward_model", "config": {"model": str(scene.reward_model)}},
            "trainer": {"kind": "trainer", "config": trainer},
            "trainer-behind": {"kind": "trainer", "config": behind},
            "rollout": {"kind": "rollout", "config": rollout},
            "gateway": {"kind": "gateway", "config": gateway},
        },
    }
    process = scene.start("up", [*_SLUICE, "up", scene.write("up.yaml", up)])

    def is_up() -> bool | None:
        if process.poll() is not None:
            log = (scene.directory / "up.log").read_text()
            raise CheckError(f"the services did not start:\n{log[-4000:]}")
        return True if (scene.directory / "prometheus.json").exists() else None

    wait_until("the services", is_up)


_SLUICE = (sys.executable, "-m", "sluice.cli")


def start_prometheus(scene: Scene, loop_port: int) -> str:
    """Prometheus over all of them and the host; its URL."""
    node, own = free_port("127.0.0.1"), free_port("127.0.0.1")
    exporter = [shutil.which(PROGRAMS[2]) or "", f"--web.listen-address=127.0.0.1:{node}"]
    scene.start("node-exporter", exporter)
    tls = {f"{use}_file": path for use, path in scene.security["tls"].items()}
    secured = {
        "scheme": "https",
        "tls_config": tls,
        "authorization": {"credentials_file": scene.security["token_file"]},
    }
    targets = {"files": [str(scene.directory / "prometheus.json")]}
    loop = {"targets": [f"127.0.0.1:{loop_port}"], "labels": {"service": "loop"}}
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "5s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "sluice", "file_sd_configs": [targets], **secured},
            {"job_name": "sluice-loop", "static_configs": [loop], **secured},
            {"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{node}"]}]},
        ],
    }
    command = [
        shutil.which(PROGRAMS[0]) or "",
        f"--config.file={scene.write('prometheus.yml', config)}",
        f"--storage.tsdb.path={scene.directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    process = scene.start("prometheus", command)
    url = f"http://127.0.0.1:{own}"

    def is_ready() -> bool | None:
        if process.poll() is not None:
            log = (scene.directory / "prometheus.log").read_text()
            raise CheckError(f"Prometheus ended:\n{log[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return None

    wait_until("Prometheus", is_ready)
    return url


def train(scene: Scene, name: str, loop_port: int, **changes: Any) -> None:
    """A run, as a process of its own."""
    prompts = {"file": str(scene.directory / "prompts.jsonl")}
    environment = {"name": "prompts", "settings": {"reward": "position_match"}}
    config = {
        "run_dir": str(scene.directory / name),
        "services": str(scene.directory / "services.json"),
        "security": scene.security,
        "server": {"metrics_port": loop_port},
        "prompts": prompts,
        "environment": environment,
        "sampling": {"max_new_tokens": 5},
        "groups_per_step": 8,
        "samples_per_group": 8,
        "checkpoint_every": 4,
        "service_timeout_seconds": PATIENCE,
        **changes,
    }
    scene.run(name, [*_SLUICE, "train", scene.write(f"{name}.yaml", config)])


def ask_over_http(scene: Scene) -> None:
    """A completion, a score, and requests that are refused."""
    token = Path(scene.security["token_file"]).read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{scene.services['rollout']['openai_url']}/completions"
    scores = scene.services["scores"]["classify_url"]
    for to, body, wanted in (
        (url, {"model": "policy", "prompt": "1234=", "max_tokens": 4}, 200),
        (url, {"model": "nobody", "prompt": "1234="}, 404),
        (scores, {"model": "reward-model", "text": ["1234=1", "1="]}, 200),
        (scores, {"model": "nobody", "text": "1234=1"}, 404),
    ):
        code, _ = post(scene, to, body, headers)
        if code != wanted:
            raise CheckError(f"{to} answered {code} to {body}, not {wanted}")


def post(scene: Scene, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    """Status and JSON of an answer, or its bytes where it is something else."""
    tls = scene.security["tls"]
    context = ssl.create_default_context(cafile=tls["ca"])
    context.load_cert_chain(tls["cert"], tls["key"])
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as answer:
            told = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(told) if is_json else told
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask_gateway(scene: Scene) -> None:
    """A model of a trainer that has no adapters, which is refused, and a sample of the base."""
    token = Path(scene.security["token_file"]).read_text().strip()

    def ask(path: str, **body: Any) -> Any:
        url = f"{scene.services['gateway']['tinker_url']}/api/v1/{path}"
        code, answer = 408, None
        while code == 408:  # not yet
            code, answer = post(scene, url, body, {"X-API-Key": f"tml-{token}"})
        if code != 200:
            raise CheckError(f"{url} answered {code} to {body}: {answer}")
        return answer

    session, model = ask("create_session", tags=[])["session_id"], str(scene.model)
    wanted = {"session_id": session, "base_model": model}
    made = ask("create_model", model_seq_id=0, lora_config={"rank": 2}, **wanted)
    sampler = ask("create_sampling_session", sampling_session_seq_id=0, **wanted)
    sampled = ask(
        "asample",
        sampling_session_id=sampler["sampling_session_id"],
        seq_id=0,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        sampling_params={"max_tokens": 1},
    )
    refused, answer = (ask("retrieve_future", request_id=f["request_id"]) for f in (made, sampled))
    if not isinstance(refused, dict) or "error" not in refused:
        raise CheckError(f"the gateway did what nothing can: {refused!r}")
    if not isinstance(answer, bytes):  # protobuf
        raise CheckError(f"the gateway sampled nothing: {answer}")


def convert_and_verify(scene: Scene) -> None:
    """A checkpoint there and back, by the converter."""
    address, tls = scene.services["converter"]["address"], scene.security["tls"]
    flags = [f"--address={address}", f"--security.token_file={scene.security['token_file']}"]
    flags += [f"--security.tls.{use}={path}" for use, path in tls.items()]
    megatron = str(scene.directory / "megatron")
    scene.run("convert", [*_SLUICE, "convert", str(scene.model), megatron, *flags])
    scene.run("verify", [*_SLUICE, "verify", str(scene.model), megatron, *flags])


async def send_to_sleep(scene: Scene) -> None:
    """A trainer that gives its device up, and takes it back."""
    security = SecurityConfig.model_validate(scene.security)
    async with TrainerClient(scene.services["trainer"]["address"], security) as trainer:
        await trainer.sleep(PATIENCE)
        await trainer.wake(PATIENCE)


async def write_behind(scene: Scene) -> None:
    """A version that is written after it was offered to an engine, which has another store."""
    security = SecurityConfig.model_validate(scene.security)
    engine = TransferTarget(engine_id="rollout", address=scene.services["rollout"]["address"])
    async with TrainerClient(scene.services["trainer-behind"]["address"], security) as trainer:
        await trainer.publish_weights([engine])


def work(scene: Scene, loop_port: int) -> None:
    """Everything that panels show: a run, one whose weights are sent, other callers."""
    held_out = {
        "prompts": {"file": str(scene.directory / "prompts.jsonl"), "shuffle": False},
        "groups": 8,
    }
    evaluation = {"datasets": {"held_out": held_out}, "every_steps": 8}
    train(scene, "stored", loop_port, steps=STEPS, evaluation=evaluation)
    ask_over_http(scene)
    ask_gateway(scene)
    convert_and_verify(scene)
    asyncio.run(send_to_sleep(scene))
    asyncio.run(write_behind(scene))
    # the trainer begins where a checkpoint of the first run is
    checkpoints = sorted((scene.directory / "store" / "checkpoints").iterdir())
    train(
        scene,
        "sent",
        loop_port,
        steps=SENT_STEPS,
        weight_transport="collective",
        initial_checkpoint=f"checkpoints/{checkpoints[-1].name}",
    )


@dataclass(frozen=True)
class Answers:
    """What Prometheus says of the time since `start`."""

    url: str
    start: float

    def ask(self, expr: str, end: float) -> list[dict[str, Any]]:
        """Series of a panel's query. Raises CheckError for one that Prometheus refuses."""
        expr = expr.replace("$__rate_interval", WINDOW).replace("$instance", ".+")
        step = max(SCRAPE_SECONDS, math.ceil((end - self.start) / LIMIT))
        query = {"query": expr, "start": self.start, "end": end, "step": step}
        data = urllib.parse.urlencode(query).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query_range", data, 60) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise CheckError(f"{expr}: {error.read().decode()}") from None
        return found


def points(series: dict[str, Any]) -> list[tuple[float, float]]:
    """Those that are numbers: a quantile of nothing is none."""
    values = ((float(when), float(text)) for when, text in series["values"])
    return [(when, value) for when, value in values if math.isfinite(value)]


def _name_of(dashboard: Dashboard, panel: Panel) -> str:
    return f"{dashboard.name}: {panel.title}"


def panels_with_data(answers: Answers, note: Callable[[str], None]) -> dict[str, Any]:
    """Series of every query of every panel that has numbers; a query without is told."""
    end, found = time.time(), {}
    for dashboard in dashboards():
        for panel in dashboard.panels:
            all_series = [answers.ask(query.expr, end) for query in panel.queries]
            told = [any(map(points, series)) for series in all_series]
            if all(told):
                found[_name_of(dashboard, panel)] = all_series
                continue
            for query, has in zip(panel.queries, told, strict=True):
                if not has:
                    note(f"no data: {_name_of(dashboard, panel)}: {query.expr}")
    return found


def tested_alerts() -> set[str]:
    """Rules with a case in which they fire and clear, where promtool agrees. Raises CheckError."""
    command = [shutil.which(PROGRAMS[1]) or "", "test", "rules", str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise CheckError(f"promtool: {done.stdout}{done.stderr}")
    states: dict[str, list[bool]] = {}
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for each in case["alert_rule_test"]:
            states.setdefault(each["alertname"], []).append(bool(each["exp_alerts"]))
    return {name for name, fired in states.items() if True in fired and not fired[-1]}


def draw(found: dict[str, Any], directory: Path) -> None:
    """Each dashboard as a PNG, to be looked at where there is no Grafana."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for dashboard in dashboards():
        shown = [p for p in dashboard.panels if _name_of(dashboard, p) in found]
        rows = -(-len(shown) // 4)
        figure, axes = pyplot.subplots(rows, 4, figsize=(18, 2.4 * rows), layout="constrained")
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, shown, strict=False):
            axis.set_title(f"{panel.title} ({panel.unit})", fontsize=8)
            axis.tick_params(labelsize=6)
            for series in (each for group in found[_name_of(dashboard, panel)] for each in group):
                if here := points(series):
                    axis.plot([when - here[0][0] for when, _ in here], [y for _, y in here], lw=1)
        figure.savefig(directory / f"{dashboard.name}.png", dpi=80)
        pyplot.close(figure)


@contextlib.contextmanager
def staged(directory: Path) -> Iterator[Scene]:
    """An empty directory; processes end with the block."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    scene = Scene(directory.absolute())
    with scene.processes:
        yield scene


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("build/observability"))
    flags = parser.parse_args(arguments)
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        print(
            f"observability-check needs {', '.join(missing)} "
            "(Debian: apt-get install prometheus prometheus-node-exporter)",
            file=sys.stderr,
        )
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def note(text: str) -> None:
        print(text, flush=True)

    try:
        with staged(flags.directory) as scene:
            prepare(scene)
            loop_port = free_port("127.0.0.1")
            start_services(scene)
            url = start_prometheus(scene, loop_port)
            answers = Answers(url, time.time())
            work(scene, loop_port)
            time.sleep(2 * SCRAPE_SECONDS)  # what was counted last is scraped too
            found = panels_with_data(answers, note)
            draw(found, scene.directory)
        tested = tested_alerts()
    except CheckError as error:
        print(f"observability-check: {error}", file=sys.stderr)
        return 1
    rules, panels = {alert.name for alert in alerts()}, sum(len(d.panels) for d in dashboards())
    note(f"dashboards as pictures: {flags.directory}/*.png")
    note(
        f"observability: panels={panels} with_data={len(found)} "
        f"alerts={len(rules)} tested={len(rules & tested)}"
    )
    return 0 if panels == len(found) and rules == tested else 1


if __name__ == "__main__":
    sys.exit(main())
