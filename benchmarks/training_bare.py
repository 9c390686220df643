"""Training speed of the reference backend beside a bare loop, on long responses.

`python -m benchmarks.training_bare [--prompt 128] [--siblings 2] [--repeats 3] [--threads 1]`

Both take the same step on the same random Qwen3 of two layers and the same rows, in one process
and in turn: forward, PPO-clip, backward, clipping and AdamW, in float32. The bare loop is what one
writes without us: transformers' own causal SDPA, one row after another, `cross_entropy` over the
logits of the response. Ours gets micro-batches of whole rows under a token cap, as a rank does.

Last line: processor seconds of the bare loop over ours, the median of the repeats, at responses of
2,048, 4,096 and 8,192 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.algo.spec import LossSpec
from sluice.config import parse_config

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
RESPONSES = {"2k": 2048, "4k": 4096, "8k": 8192}
TOKENS = 16384  # response tokens of a step
CAP = 17 * 1024  # tokens of a micro-batch
CLIP, MAX_NORM, RATE = 0.2, 1.0, 1e-6


@dataclass
class BareLoop:
    """One row at a time through plain transformers."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def load(cls, path: Path) -> BareLoop:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return cls(model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))

    def step(self, rows: Sequence[Row]) -> float:
        """Returns the mean loss."""
        total, count = 0.0, sum(row.response_length for row in rows)
        for row in rows:
            ids = row.token_ids[None]
            kept = row.response_length + 1
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, :-1]
            logprobs = -cross_entropy(logits, row.token_ids[row.prompt_length :], reduction="none")
            ratio = (logprobs - row.columns["rollout_logprobs"]).exp()
            advantages = row.columns["advantages"]
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            loss = -torch.minimum(ratio * advantages, clipped).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


@dataclass
class Ours:
    """The backend of a rank, which gets whole micro-batches."""

    backend: ReferenceBackend

    @classmethod
    def load(cls, path: Path, store: Path) -> Ours:
        values = {"model": str(path), "store": str(store), "optim": {"max_grad_norm": MAX_NORM}}
        config = parse_config(TrainerConfig, values)
        return cls(ReferenceBackend(config, Mesh(rank=0, world_size=1)))

    def step(self, rows: Sequence[Row]) -> float:
        """Returns the mean loss."""
        spec = LossSpec(name="ppo_clip", clip_low=CLIP)
        sums = self.backend.forward_backward(_micro_batches(rows), spec)
        self.backend.step(normalizer=float(sums.token_count), learning_rate=RATE)
        return sums.loss / sums.token_count


def _micro_batches(rows: Sequence[Row]) -> list[list[Row]]:
    batches: list[list[Row]] = []
    room = 0
    for row in rows:
        if room < len(row.token_ids):
            batches.append([])
            room = CAP
        batches[-1].append(row)
        room -= len(row.token_ids)
    return batches


def make_rows(prompt: int, response: int, siblings: int) -> list[Row]:
    """TOKENS response tokens in rows of which `siblings` have one prompt."""
    generator = torch.Generator().manual_seed(response)
    rows = []
    for index in range(TOKENS // response):
        if index % siblings == 0:
            prompt_ids = torch.randint(SIZES["vocab_size"], (prompt,), generator=generator)
        response_ids = torch.randint(SIZES["vocab_size"], (response,), generator=generator)
        noise = torch.randn((2, response), generator=generator)
        rows.append(
            Row(
                sample_id=str(index),
                group_id=str(index // siblings),
                token_ids=torch.cat([prompt_ids, response_ids]),
                prompt_length=prompt,
                loss_mask=torch.ones(response, dtype=torch.bool),
                columns={"advantages": noise[0], "rollout_logprobs": noise[1] * 0.1 - 8.3},
            )
        )
    return rows


def processor_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--siblings", type=int, default=2, help="rows of one prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", nargs="+", choices=RESPONSES, default=list(RESPONSES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(path)
        ours, bare = Ours.load(path, Path(folder)), BareLoop.load(path)
        warm_up = make_rows(options.prompt, 512, options.siblings)[:8]
        losses = bare.step(warm_up), ours.step(warm_up)
        assert abs(losses[0] - losses[1]) < 1e-4, losses  # the same step on both sides
        for name in options.lengths:
            rows = make_rows(options.prompt, RESPONSES[name], options.siblings)
            pairs = [
                (
                    processor_seconds(partial(bare.step, rows)),
                    processor_seconds(partial(ours.step, rows)),
                )
                for _ in range(options.repeats)
            ]
            apart, own = (statistics.median(side) for side in zip(*pairs, strict=True))
            found[name] = apart / own
            print(f"{name}: {len(rows)} rows  bare {apart:.2f} s  ours {own:.2f} s", flush=True)
    print("training: " + " ".join(f"vs_bare_{name}={ratio:.2f}" for name, ratio in found.items()))


if __name__ == "__main__":
    main()
