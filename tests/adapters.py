"""Adapters as plain peft makes and applies them, and as versions of a store."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # peft uses it and does not import it
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, decode_adapter_config
from sluice.weights.checkpoint import describe_shard, digest_base
from sluice.weights.store import StoredVersion, WeightStore

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def make_adapter(
    model: Path, folder: Path, seed: int, *, rank: int = 4, targets: Sequence[str] = TARGETS
) -> Path:
    """A peft folder of random factors, large enough to change what is drawn."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=3 * rank,
        target_modules=list(targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def import_adapter(
    store: WeightStore, folder: Path, base_digest: str, parent: int | None = None, line: str = ""
) -> StoredVersion:
    """Publishes a peft folder as a version, of one adapter of several where `line` names it."""
    spec = decode_adapter_config((folder / ADAPTER_CONFIG).read_bytes(), base_digest)
    staging = store.allocate(parent)
    shutil.copyfile(folder / ADAPTER_FILE, staging.directory / ADAPTER_FILE)
    shard = describe_shard(staging.directory / ADAPTER_FILE)
    try:
        return store.commit(staging, [shard], [], 0, adapter=spec, line=line)
    except BaseException:
        store.abort(staging)
        raise


def publish_adapters(
    store: WeightStore, model: Path, root: Path, count: int
) -> list[StoredVersion]:
    """Publishes random adapters of a model as the next versions."""
    digest, records = digest_base(model), list[StoredVersion]()
    for index in range(count):
        folder = make_adapter(model, root / f"adapter-{index}", seed=10 + index)
        parent = records[-1].version if records else None
        records.append(import_adapter(store, folder, digest, parent))
    return records


@torch.no_grad()
def peft_logprobs(
    model: Path,
    folder: Path | None,
    prompt: Sequence[int],
    response: Sequence[int],
    dtype: Any = None,
) -> list[float]:
    """Teacher-forced by transformers with the adapter of a peft folder merged in, if any."""
    # eager: that of torch leaves out that scores are capped
    options: Any = {"dtype": dtype or torch.float32, "attn_implementation": "eager"}
    module: Any = AutoModelForCausalLM.from_pretrained(model, **options)
    if folder is not None:
        module = PeftModel.from_pretrained(module, folder).merge_and_unload()
    logits = module.eval()(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    table = logits.double().log_softmax(-1)
    chosen: list[float] = table.gather(1, torch.tensor([*response])[:, None])[:, 0].tolist()
    return chosen
