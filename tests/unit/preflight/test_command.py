"""`sluice check` as a command, on the files that are shipped, and in the words of a run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.layout import mesh_of
from services.trainer.config import TrainerConfig
from services.trainer.mesh import LayoutError
from sluice import cli
from sluice.config import ConfigError, load_config, parse_config, read_yaml
from sluice.config_faults import examine_values
from sluice.finding import OK
from sluice.loop.config import RunConfig
from sluice.preflight.command import preflight
from sluice.stack import CONFIGS, START_ORDER, UpConfig
from sluice.supervise import Supervisor
from tests.patience import PATIENCE
from tests.tutorials import write_files
from tests.unit.preflight.conftest import Files
from tests.unit.test_docs_blocks import PAGES, blocks

ROOT = Path(__file__).parents[3]
TAUGHT = {"advantage": {"name": "distillation"}}


def sluice(*arguments: object) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        patch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        code = cli.main()
    return code, out.getvalue(), error.getvalue()


def told(run: Path | str, services: Path | str | None, kind: str | None = None) -> list[str]:
    path = None if services is None else str(services)
    found = asyncio.run(preflight(str(run), [], path, kind, 200))
    return [f"{each.state} {each.subject}: {each.text}" for each in found if each.state != OK]


def test_a_run_that_would_end_well_is_told_what_it_is(files: Files) -> None:
    run, services = files.paths()
    code, out, error = sluice("check", run, "--up", services)
    assert (code, error) == (0, "")
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert {state for state, *_ in lines} == {"ok"}
    trainer, held = (text for _, subject, text in lines if subject == "trainer")
    assert trainer.startswith("reference, qwen3 of ") and "0.1 M parameters" in trainer
    assert held.startswith("a rank holds 0.0 GiB of a device (weights 0.0, gradients 0.0, ")
    summary = {subject: text for _, subject, text in lines}
    assert "16 tokens a sample" in summary["rollout"]
    assert summary["steps"] == (
        "`sluice train`: 10 steps of 4 groups, 4 answers of up to 4 tokens: 64 sampled tokens a "
        "step at most"
    )
    assert summary["writes"] == f"{files.folder}/run, and the store {files.folder}/up/store"


def test_a_run_that_would_fail_is_told_why_and_the_command_says_so(files: Files) -> None:
    files.trainer["ranks"] = {"count": 0}
    run, services = files.paths()
    code, out, error = sluice("check", run, "--up", services, "--steps", "3", "--stop_window", "2")
    assert code == 2
    assert error == "sluice: check: the run would fail: trainer, run.yaml\n"
    assert "wrong    trainer" in out and "ranks.count: " in out
    assert "stop_window: has no effect" in out
    assert "steps of 4 groups" not in out, "what would run is told of sound settings alone"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--up", "services.yaml", "--steps", "3"], "the file comes before flags"),
        (
            ["run.yaml", "--as", "trian"],
            "--as: 'trian' is no command that trains; did",
        ),
        (["run.yaml", "--rows", "-1"], "--rows: '-1' is no number of rows"),
    ],
)
def test_a_command_that_is_none_is_refused(arguments: list[str], expected: str) -> None:
    code, _, error = sluice("check", *arguments)
    assert code == 2 and expected in error


def test_a_flag_or_a_file_that_is_none_is_a_finding_among_others(files: Files) -> None:
    files.services["run_dirr"] = "x"
    run, services = files.paths()
    code, out, _ = sluice("check", run, "--up", services, "--stepz", "3")
    assert code == 2
    assert "unknown flag --stepz; did you mean --steps?" in out
    assert "run_dirr: unknown key" in out
    code, out, _ = sluice("check", files.folder / "none.yaml", "--up", files.folder / "no.yaml")
    assert "none.yaml does not exist" in out and "no.yaml does not exist" in out
    (files.folder / "run.yaml").write_text("a: [")
    assert "is not valid YAML" in sluice("check", run)[1]


def test_torch_is_left_alone_where_no_model_is_looked_at(files: Files) -> None:
    run, _ = files.paths()
    code = (
        "import asyncio, sys\n"
        "from sluice.preflight.command import preflight\n"
        f"asyncio.run(preflight({run!r}, [], None, None, 9))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


# the words of a run


@contextlib.contextmanager
def services_json(files: Files) -> Iterator[None]:
    """As of services that were there."""
    path = files.folder / "up" / "services.json"
    path.parent.mkdir(exist_ok=True)
    store = str(files.folder / "up" / "store")
    kinds = {"router": "router", "trainer": "trainer"}
    entry = {"address": "127.0.0.1:1", "store": store}
    path.write_text(json.dumps({name: {"kind": kind, **entry} for name, kind in kinds.items()}))
    yield
    path.unlink()


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": {"file": "none.jsonl"}},
        {"filters": [{"name": "reward_stdd"}]},
        {"trackers": {"wandb": {"project": "p"}}},
        {"stepz": 3},
        {"deterministic": True, "max_staleness": 2},
        {"teachers": {"t": {"service": "old"}}, "algorithm": TAUGHT},
        {"critic": {"service": "old"}, "algorithm": {"advantage": {"name": "gae"}}},
    ],
)
def test_a_run_ends_in_the_words_of_the_check(
    files: Files, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    files.run |= change
    run, _ = files.paths()
    with services_json(files):
        code, _, error = sluice("train", run)
        found = files.wrong(up=False)
    assert code == 2
    assert error.removeprefix("sluice: ").rstrip("\n") in found


def test_services_end_in_the_words_of_the_check(files: Files) -> None:
    files.trainer.update(autocast=True, backend="fsdp")
    _, services = files.paths()
    values = {**files.trainer, "store": "store"}
    with pytest.raises(ConfigError) as caught:
        parse_config(TrainerConfig, values)
    assert str(caught.value) in files.wrong()
    del files.trainer["autocast"]
    files.trainer.update(fsdp={"tensor": 2}, ranks={"count": 3})
    with pytest.raises(LayoutError) as refused:
        mesh_of(FsdpConfig(tensor=2), 0, 3)
    assert f"ranks.count: {refused.value}" in files.wrong()
    files.services["services"]["router"]["resources"] = {"cpus": 1 << 20}
    files.paths()
    with pytest.raises(ConfigError) as here:
        Supervisor(load_config(UpConfig, ["--config", services]))
    assert any(str(here.value) in each for each in files.faults())


def test_every_kind_of_service_has_a_configuration() -> None:
    assert CONFIGS.keys() == set(START_ORDER)


# what is shipped


@pytest.fixture
def shipped(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as a repository's, with models where the examples have them."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in ("example", "hidden-digits"):
        shutil.copytree(tiny_model, tmp_path / "runs" / name / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("run", "services", "kind"),
    [
        ("run", "services", "train"),
        ("sft", "services", "sft"),
        ("dpo", "services", "dpo"),
        ("reward_model", "reward_model_services", "reward-model"),
        ("hidden_digits", "hidden_digits_services", "train"),
    ],
)
def test_the_examples_have_nothing_to_tell(
    shipped: Path, run: str, services: str, kind: str
) -> None:
    run_dir = read_yaml(f"examples/{services}.yaml")["run_dir"]
    assert Path(read_yaml(f"examples/{run}.yaml")["services"]).parent == Path(run_dir)
    found = asyncio.run(
        preflight(f"examples/{run}.yaml", [], f"examples/{services}.yaml", None, 200)
    )
    assert [each for each in found if each.state != OK] == []
    assert any(f"`sluice {kind}`" in each.text for each in found)


def test_every_example_is_looked_at() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    looked = {"run", "sft", "dpo", "reward_model", "hidden_digits"}
    assert names == looked | {"services", "reward_model_services", "hidden_digits_services"}


@pytest.mark.parametrize("trainer", ["trainer", "trainer.cuda", "trainer.tinker"])
def test_what_compose_starts_has_nothing_to_tell(
    shipped: Path, tiny_model: Path, trainer: str
) -> None:
    """Its configurations name addresses and /store, which containers have."""
    store = shipped / "store"
    shutil.copytree(tiny_model, store / "model")

    def config(name: str) -> dict[str, Any]:
        text = (ROOT / "deploy" / "config" / f"{name}.yaml").read_text()
        found = yaml.safe_load(text.replace("/store", str(store)).replace("/runs", str(shipped)))
        del found["server"]
        return {key: value for key, value in found.items() if key not in ("router", "trainer")}

    services = {
        "router": {"kind": "router", "config": config("router")},
        "trainer": {"kind": "trainer", "config": config(trainer)},
        "rollout": {"kind": "rollout", "replicas": 2, "config": config("rollout")},
        "converter": {"kind": "converter", "config": config("converter")},
    }
    if trainer == "trainer.tinker":
        gateway = config("gateway")
        del gateway["tinker"]["port"]
        services["gateway"] = {"kind": "gateway", "config": gateway}
    (shipped / "services.yaml").write_text(
        yaml.safe_dump({"run_dir": str(shipped / "up"), "services": services})
    )
    run = config("run") | {"services": str(shipped / "up" / "services.json")}
    (shipped / "run.yaml").write_text(yaml.safe_dump(run))
    assert told("run.yaml", "services.yaml") == []


@pytest.mark.parametrize("flags", [[], ["--backend", "fsdp"]])
def test_what_init_writes_has_nothing_to_tell(shipped: Path, flags: list[str]) -> None:
    build_tiny_qwen3(shipped / "model", 0)
    task = shipped / "examples" / "copy_digits.jsonl"
    code, *_ = sluice("init", "model", task, "-o", "mine", "--max_new_tokens", "16", *flags)
    assert code == 0
    assert told("mine/run.yaml", "mine/services.yaml") == []


@pytest.mark.parametrize("name", ["environment", "loss", "recovery"])
def test_the_files_of_a_tutorial_have_nothing_to_tell(
    shipped: Path, tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users' modules among them; none of its commands is run."""
    folder = shipped / "tutorial"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_files(name, folder)
    rows = [{"prompt": f"{digit}=", "answer": 4 * f"{digit}"} for digit in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))  # by a command there
    services = read_yaml("services.yaml")["services"]
    shutil.copytree(tiny_model, services["trainer"]["config"]["model"])
    assert told("run.yaml", "services.yaml") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_settings_that_pages_show_go_together(page: Path, tmp_path: Path) -> None:
    """Parts of a run, on top of one that is sound; and services, whose own settings are theirs."""
    one = {"prompts": {"index_count": 8}, "environment": {"name": "prompts"}}
    base = {"run_dir": "run", "services": "s.json", "sampling": {"max_new_tokens": 8}}
    for text in blocks(page, "yaml"):
        (tmp_path / "block.yaml").write_text(text)
        values = read_yaml(tmp_path / "block.yaml")
        services = values.get("services")
        if isinstance(services, dict) and all("kind" in each for each in services.values()):
            assert examine_values(UpConfig, {"run_dir": "up", **values}).faults == []
        elif values.keys() <= RunConfig.model_fields.keys():
            own = {} if "environments" in values else one
            assert examine_values(RunConfig, {**base, **own, **values}).faults == []
