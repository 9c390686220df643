"""`sluice demo --lora`: a base that the whole model learns, and adapters beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples import demo_mixture
from services.rollout.config import RolloutConfig
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from sluice.demo.adapters import adapting
from sluice.demo.command import main, read_flags
from sluice.demo.copy_digits import services
from sluice.demo.tiny_qwen3 import build_tiny_qwen3
from sluice.loop.config import RunConfig
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import WeightStore
from tests.e2e.conftest import ENVIRONMENT
from tests.patience import PATIENCE

RANK, STEPS = 4, 3


@pytest.mark.long
def test_adapters_train_beside_the_base_that_the_whole_model_learned(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "sluice.cli", "demo", "--run-dir", run_dir]
    done = subprocess.run(
        [*command, *("--lora", str(RANK), "--steps", str(STEPS), "--target", "0")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    number = r"\d+\.\d+"
    found = re.fullmatch(
        rf"demo: reward first={number} last={number} steps={STEPS} seconds=\d+ "
        rf"cpu_seconds=({number}) startup_cpu=({number}) cpu_per_step={number} "
        rf"adapter_mib=({number})",
        line,
    )
    assert found, line
    whole, startup, mib = map(float, found.groups())
    assert 0 < startup < whole
    bases = WeightStore(run_dir / "base" / "store" / "weights")
    base = bases.latest()
    assert base.adapter is None
    assert base.digest != digest_base(run_dir / "model")
    adapter = WeightStore(run_dir / "store" / "weights").latest()
    assert adapter.adapter is not None and adapter.directory is not None
    assert (adapter.adapter.rank, adapter.adapter.base_digest) == (RANK, base.digest)
    tensors = load_file(adapter.directory / "adapter_model.safetensors")
    assert all(t.any() for name, t in tensors.items() if "lora_B" in name)
    size = sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20
    assert size <= mib <= size + 0.01  # names, and that of the line is rounded
    prompts, others = (
        (directory / "prompts.jsonl").read_text() for directory in (run_dir, run_dir / "base")
    )
    assert prompts != others


@pytest.mark.parametrize("backend", ["reference", "fsdp", "megatron"])
@pytest.mark.parametrize("engine", ["reference", "sglang"])
def test_every_service_is_told_of_adapters(tmp_path: Path, backend: str, engine: str) -> None:
    words = ["--algorithm", "ppo", "--lora", "24", "--sglang-python", sys.executable]
    flags = read_flags([*words, "--backend", backend, "--engine", engine])
    base = build_tiny_qwen3(tmp_path / "base")
    up, _ = adapting(tmp_path, base, flags)
    configs = {n: {"store": tmp_path, **service.config} for n, service in up.services.items()}
    trainer = parse_config(TrainerConfig, configs["trainer"])
    assert trainer.lora is not None
    assert (trainer.backend, trainer.lora.rank) == (backend, 24)
    assert parse_config(TrainerConfig, configs["critic"]).lora is None
    router = {"router": "localhost:1"}
    rollout = parse_config(RolloutConfig, configs["rollout"] | router).engine
    assert rollout.model == trainer.model == str(base)
    assert (rollout.backend, rollout.sglang.lora and rollout.sglang.lora.max_rank) == (
        engine,
        24 if engine == "sglang" else None,
    )


@pytest.mark.parametrize("backend", ["reference", "fsdp", "megatron"])
def test_the_mixture_has_services_for_its_flags(tmp_path: Path, backend: str) -> None:
    flags = demo_mixture.read_flags(["--backend", backend, "--ranks", "2"])
    base = build_tiny_qwen3(tmp_path / "base")
    up = services(tmp_path, base, flags)
    config = {"store": tmp_path, **up.services["trainer"].config}
    trainer = parse_config(TrainerConfig, config)
    assert (trainer.backend, trainer.ranks.count) == (backend, 2)
    assert parse_config(RunConfig, demo_mixture.training(tmp_path, flags)).steps == flags.steps


def test_the_optimizer_is_muon_where_it_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--optimizer", "muon", "--run-dir", str(tmp_path)]
    for more in (["--lora", "8"], ["--backend", "megatron"]):
        assert main([*words, *more]) == 2
        assert "--optimizer muon" in capsys.readouterr().err.splitlines()[-1]
    assert not any(tmp_path.iterdir())
    up = services(tmp_path, build_tiny_qwen3(tmp_path / "base"), read_flags(words))
    config = {"store": tmp_path, **up.services["trainer"].config}
    assert parse_config(TrainerConfig, config).optim.kind == "muon"


@pytest.mark.parametrize("words", [["--algorithm", "opd", "--lora", "8"], ["--lora", "-1"]])
def test_what_adapters_cannot_do_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--run-dir", str(tmp_path)]) == 2
    assert "--lora" in capsys.readouterr().err.splitlines()[-1]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--steps", "0"), ("--max-staleness", "-1"), ("--ranks", "0"), ("--target", "nan")],
)
def test_a_number_that_no_demo_can_have_is_refused_before_anything_is_made(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag, value, "--run-dir", str(tmp_path)]) == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]
    assert not any(tmp_path.iterdir())
