"""Megatron is adapted to a CPU inside its own modules only, and only on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.trainer.backends.megatron import cpu, upstream
from sluice.platform import PlatformError
from tests.megatron.models import build_checkpoint
from tests.patience import PATIENCE

CONFINED = """
import torch
before = {name: getattr(torch, name) for name in ("tensor", "zeros", "ones", "empty")}
from services.trainer.backends.megatron import upstream
upstream.load()
import megatron.core.optimizer.optimizer as theirs
import megatron.core.tensor_parallel.random as random

assert all(getattr(torch, name) is made for name, made in before.items())
assert theirs.torch is not torch
assert theirs.torch.zeros(1, device="cuda").device.type == "cpu"
assert random.torch.cuda.current_device() == torch.device("cpu")
assert theirs.torch.Tensor is torch.Tensor and theirs.torch.nn is torch.nn
assert torch.zeros(1).type() == "torch.FloatTensor"
for refused in (lambda: torch.zeros(1, device="cuda"), lambda: torch.zeros(1).cuda()):
    try:
        refused()
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit("the process takes CPU tensors for accelerated ones")
upstream.load()  # a second time changes nothing
assert theirs.torch is random.torch
print("confined")
"""

BESIDE_TRANSFORMERS = """
import sys
from pathlib import Path
from services.trainer.backends.megatron import upstream
upstream.load()  # first: what transformers does must not depend on it
import torch
from transformers import AutoModelForCausalLM
from tests.megatron.models import build_checkpoint
model = AutoModelForCausalLM.from_pretrained(build_checkpoint("qwen3", Path(sys.argv[1])))
exponents = torch.arange(0, 32, 2) / 32
assert torch.allclose(model.model.rotary_emb.inv_freq, 10000.0**-exponents)
print("initialised")
"""

LEAN = """
import sys
from pathlib import Path
from services.trainer.backends.megatron import backend
from services.trainer.backends.megatron.model import PositionRotary
from services.trainer.backends.megatron.model_config import read_model
source = read_model(Path(sys.argv[1]))
PositionRotary(source.hf_config, backend.torch.device("cpu"))
libraries = ("transformers", "transformers.modeling_utils", "torch._inductor")
print(*(name in sys.modules for name in libraries))
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_adaptation_stays_inside_megatron() -> None:
    assert _run(CONFINED) == "confined"


def test_transformers_beside_it_initialises_its_buffers(tmp_path: Path) -> None:
    assert _run(BESIDE_TRANSFORMERS, str(tmp_path)) == "initialised"


@pytest.mark.fast
def test_a_rank_imports_no_models_of_transformers_and_no_compiler(tmp_path: Path) -> None:
    """The ones are a fifth of its start, the other a third; configurations it needs."""
    assert _run(LEAN, str(build_checkpoint("qwen3", tmp_path))) == "True False False"


def test_megatron_must_not_be_imported_before() -> None:
    script = """
import megatron.core
from services.trainer.backends.megatron import cpu
from sluice.platform import PlatformError
try:
    cpu.install()
except PlatformError as error:
    print(error)
"""
    assert "imported before" in _run(script)


@pytest.mark.fast
def test_refused_where_an_accelerator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(PlatformError, match="accelerator is present"):
        cpu.install()


@pytest.mark.fast
def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "VERSION", "0.17.0")
    with pytest.raises(upstream.MegatronVersionError, match=r"0\.17\.0 is needed, found 0\.16\.1"):
        upstream.load.__wrapped__()
