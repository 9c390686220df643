"""What encoding a group's prompt once saves in training, against one plain pass per sample.

`python -m benchmarks.shared_prompt_training [tiny|smollm2] [repeats]`: random weights, one thread.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec
from sluice.config import parse_config


@dataclass(frozen=True)
class Scene:
    """A model and a batch: groups x samples of (prompt + response) tokens."""

    sizes: dict[str, Any]
    groups: int
    samples: int
    prompt: int
    response: int


SCENES = {
    "tiny": Scene(
        {"vocab_size": 13, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
        groups=32,
        samples=16,
        prompt=5,
        response=5,
    ),
    "smollm2": Scene(
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        groups=8,
        samples=8,
        prompt=60,
        response=6,
    ),
}


def make_rows(scene: Scene) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(scene.sizes["vocab_size"], (count,), generator=generator)

    rows = []
    for group in range(scene.groups):
        prompt = draw(scene.prompt)
        for index in range(scene.samples):
            rows.append(
                Row(
                    sample_id=f"{group}/{index}",
                    group_id=str(group),
                    token_ids=torch.cat([prompt, draw(scene.response)]),
                    prompt_length=scene.prompt,
                    loss_mask=torch.ones(scene.response, dtype=torch.bool),
                )
            )
    return rows


def processor_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median processor time of a call, after one call to warm up."""
    run()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return statistics.median(found)


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    scene = SCENES[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = make_rows(scene)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        LlamaForCausalLM(LlamaConfig(**scene.sizes)).save_pretrained(path)
        values = {"model": str(path), "store": folder}
        backend = ReferenceBackend(parse_config(TrainerConfig, values), Mesh(rank=0, world_size=1))
        shared = processor_seconds(
            lambda: backend.forward_backward([rows], LossSpec(name="sft")), repeats
        )
        backend.close()
        plain_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.stack([row.token_ids for row in rows])

    def plain() -> None:
        logits = plain_model(input_ids=ids[:, :-1], use_cache=False).logits[:, scene.prompt - 1 :]
        targets = ids[:, scene.prompt :, None]
        (-logits.float().log_softmax(-1).gather(2, targets)).sum().backward()

    apart = processor_seconds(plain, repeats)
    print(
        f"shared_prompt_training: scene={name} shared={shared:.3f} plain={apart:.3f} "
        f"cpu_seconds speedup={apart / shared:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
