"""The demo's work without services, as one would write it by hand: transformers and torch alone.

`python -m benchmarks.bare_loop DIRECTORY [--seed 0] [--steps 68]`: a tiny Qwen3 learns to copy four
digits by GRPO on the prompts of the demo, with its learning rate, batch and losses. It prints the
rewards and the processor time of the steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from examples.demo import DIGITS, write_prompts
from examples.models.tiny_qwen3 import DIGITS as WORDS
from examples.models.tiny_qwen3 import build_tiny_qwen3

GROUPS, SIBLINGS, LEARNING_RATE, CLIP = 32, 16, 2e-3, 0.2
EQUALS, END, NEW = 10, 11, DIGITS + 1


@torch.no_grad()
def generate(model: Qwen3ForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample at temperature 1 until the end token; returns tokens[N, NEW] and the mask of them."""
    cache, tokens = DynamicCache(config=model.config), prompts
    alive = torch.ones(len(prompts), dtype=torch.bool)
    sampled, mask = [], []
    for _ in range(NEW):
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        chosen = torch.multinomial(logits[:, -1].softmax(-1), 1)
        sampled.append(chosen)
        mask.append(alive)
        alive = alive & (chosen[:, 0] != END)
        tokens = chosen
        if not alive.any():
            break
    short = NEW - len(sampled)
    tokens = torch.nn.functional.pad(torch.cat(sampled, 1), (0, short), value=END)
    return tokens, torch.nn.functional.pad(torch.stack(mask, 1), (0, short))


def score(tokens: torch.Tensor, mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of positions that are right, the end token among them."""
    return ((tokens == targets) & mask).float().mean(1)


def token_logprobs(model: Qwen3ForCausalLM, prompts: torch.Tensor, tokens: torch.Tensor):  # type: ignore[no-untyped-def]
    rows = torch.cat([prompts, tokens], 1)
    logits = model(rows, logits_to_keep=NEW + 1, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, questions: torch.Tensor
) -> float:
    """One step of GRPO on questions[GROUPS, DIGITS]; returns the mean reward."""
    ends = torch.full((len(questions), 1), END)
    targets = torch.cat([questions, ends], 1).repeat_interleave(SIBLINGS, 0)
    equals = torch.full((len(targets), 1), EQUALS)
    prompts = torch.cat([targets[:, :DIGITS], equals], 1)
    tokens, mask = generate(model, prompts)
    rewards = score(tokens, mask, targets)
    groups = rewards.view(GROUPS, SIBLINGS)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    logprobs = token_logprobs(model, prompts, tokens)
    ratio = (logprobs - logprobs.detach()).exp()  # one step a batch: the old ones are these
    signal = advantages.view(-1, 1)
    surrogate = torch.minimum(ratio * signal, ratio.clamp(1 - CLIP, 1 + CLIP) * signal)
    loss = -(surrogate * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=68)
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = build_tiny_qwen3(options.directory / "model", options.seed)
    write_prompts(options.directory / "prompts.jsonl", options.seed)
    lines = (options.directory / "prompts.jsonl").read_text().splitlines()
    questions = torch.tensor(
        [[WORDS.index(digit) for digit in json.loads(line)["answer"]] for line in lines]
    )
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    torch.manual_seed(options.seed)
    rewards, began = [], time.process_time()
    for step in range(options.steps):
        first = step * GROUPS % (len(questions) - GROUPS + 1)
        rewards.append(train_step(model, optimizer, questions[first : first + GROUPS]))
    cpu_per_step = (time.process_time() - began) / options.steps
    print(json.dumps({"rewards": rewards, "cpu_per_step": cpu_per_step}))


if __name__ == "__main__":
    main()
