"""What others cost an adapter that is trained among them: 1, 10 and 100 on one base.

`python -m benchmarks.adapters [--counts 1 10 100]`

A random Qwen3 of 4 million parameters, float32, the reference backend on one processor: adapters of
rank 8 in every linear layer, each with a step behind it so that it has moments. Timed is a pass
over 4 rows with the step behind it, of one adapter, then the same of each in turn where others are
in between; processor seconds, the median of 9. `exponent`: of the time by the count, between the
least and the most; 0 is no growth. Bytes are those of all tensors held.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from services.trainer.backend import Mesh, Row, TrainingBackend, create_backend
from services.trainer.config import LoraConfig, TrainerConfig
from sluice.algo.spec import LossSpec
from sluice.config import parse_config

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
ROWS, LENGTH, PROMPT = 4, 64, 16
LORA = LoraConfig(rank=8)
TIMES = 9


def build(directory: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(directory)


def draw_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        Row(
            sample_id=f"{index}",
            group_id=f"{index}",
            token_ids=torch.randint(SIZES["vocab_size"], (LENGTH,), generator=generator),
            prompt_length=PROMPT,
            loss_mask=torch.ones(LENGTH - PROMPT, dtype=torch.bool),
        )
        for index in range(ROWS)
    ]


def step(backend: TrainingBackend, name: str, rows: list[Row]) -> float:
    """Processor seconds of a pass and a step of one adapter."""
    began = time.process_time()
    backend.use_adapter(name)
    backend.forward_backward([rows], LossSpec(name="sft"))
    backend.step(normalizer=ROWS * (LENGTH - PROMPT), learning_rate=None)
    return time.process_time() - began


def held_bytes(backend: TrainingBackend) -> int:
    held = backend.held_tensors()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*held.state, *held.gradients)
    }
    return sum(storages.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100])
    counts = sorted(parser.parse_args().counts)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sluice-adapters-") as folder:
        build(Path(folder, "model"))
        values = {"model": f"{folder}/model", "store": folder, "lora": LORA, "durable": False}
        config = parse_config(TrainerConfig, values)
        backend = create_backend("reference", config, Mesh(rank=0, world_size=1))
        base = sum(p.numel() * 4 for p in backend._policy.model.parameters())  # type: ignore[attr-defined]
        rows, names = draw_rows(), [""]
        step(backend, "", rows)
        one, by_turns, held = {}, {}, {}
        for count in counts:
            while len(names) < count:
                names.append(f"user-{len(names)}")
                backend.create_adapter(names[-1], LORA)
                step(backend, names[-1], rows)
            one[count] = statistics.median(step(backend, "", rows) for _ in range(TIMES))
            turns = [names[index * 7 % count] for index in range(TIMES)]
            by_turns[count] = statistics.median(step(backend, name, rows) for name in turns)
            held[count] = held_bytes(backend)
            print(
                f"adapters={count} step_ms={one[count] * 1e3:.1f} "
                f"by_turns_ms={by_turns[count] * 1e3:.1f} held_mib={held[count] / 2**20:.1f}",
                flush=True,
            )
        least, most = counts[0], counts[-1]
        span = math.log(most / least)
        each = (held[most] - held[least]) / (most - least)
        print(
            f"adapters: exponent={math.log(one[most] / one[least]) / span:.3f} "
            f"exponent_by_turns={math.log(by_turns[most] / by_turns[least]) / span:.3f} "
            f"adapter_bytes/base={each / base:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
