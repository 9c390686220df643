"""A reward model for trials: a language model's body under a random value head.

`python -m examples.models.value_head MODEL DIRECTORY [SEED]`
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.imports import keep_loaded, uncompiled


def build_value_head(model: Path, directory: Path, seed: int = 0) -> Path:
    """Write a sequence classifier of one label, with the tokenizer of `model`."""
    with uncompiled():
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(model, num_labels=1, local_files_only=True)
    made = AutoModelForSequenceClassification.from_pretrained(
        model, config=config, local_files_only=True
    )
    torch.manual_seed(seed)
    torch.nn.init.normal_(made.score.weight)
    directory.mkdir(parents=True, exist_ok=True)
    made.config.architectures = [type(made).__name__]
    made.config.save_pretrained(directory)
    save_file(made.state_dict(), directory / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(model, local_files_only=True).save_pretrained(directory)
    return directory


def main() -> None:
    """Build it where the command says."""
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    build_value_head(Path(sys.argv[1]), Path(sys.argv[2]), seed)
    keep_loaded()


if __name__ == "__main__":
    main()
