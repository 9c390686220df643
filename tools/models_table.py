"""Rewrites docs/models.md from what `make test-models` measured: `python -m tools.models_table`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.trainer.backends.families import FAMILIES, REFUSED
from services.trainer.backends.megatron.fit import FAMILIES as MEGATRON_FAMILIES

IN_DEMO = ("qwen2_5_vl", "qwen3_vl")
RESULTS, PAGE = Path("build/models.json"), Path("docs/models.md")
HEAD = """# Models

Written by `make models-table`: families that the backends `fsdp` ([how](fsdp.md)) and `megatron`
([how](megatron.md)) train, each as a tiny random model of two to four layers, against plain
transformers, one sample at a time. Two processors, no accelerator, float32, gloo.

- *log-probs*: largest difference; *gradients*: largest difference by the largest element of its
  tensor; *norms*: largest relative difference of the gradient norm in five AdamW steps.
- *reloaded*: log-probs of the published files in transformers, beside those of the trainer.
- *rollout*: largest difference between the log-probs of the reference engine and of the trainer in
  three steps of GRPO, with weights published in between. *whole rows* marks models whose attention
  the engine does not know: it runs a sample's whole row for every token, which is right and slow.
- *ranks*: data-parallel, or by name: DP data, TP tensor, CP context parallelism, EP experts spread
  over so many of the data-parallel ranks.
- *packing*: `shared` encodes a prompt of several rows once, `rows` gives every row its own; a model
  with a window is packed by rows whatever its family.

Models of `rope_type: longrope` (Phi-3 and 4 of 128k tokens) are refused by the reference engine as
`UNSUPPORTED_MODEL`: once a row is longer than the first training all of its tokens have other
angles, those that are cached too.

Gemma 2 caps its scores, which torch's kernels do not, and transformers on them leaves out without a
word: trainers and the reference engine make all scores, as its `eager` does. Gemma 4 as it is
published reads images, which nothing here shows it: what is trained is its text alone, as
`Gemma4ForCausalLM` has it.

Layers that go from token to token, a recurrence (Mamba-2 of Nemotron 3, Granite 4, Falcon-H1 and
Bamba, Mamba of Jamba, delta nets of Qwen3-Next, Qwen3.5 and Kimi Linear) or a convolution (LFM2),
are given the rows of a pack side by side; the control, in which a state goes on over the rows, is a
thousand times the bars off. Context ranks are refused to them. Trainers run transformers' own code
of these layers, and its kernels (`mamba-ssm`, `causal-conv1d`, `flash-linear-attention`) where they
are installed, which nothing here has measured. Weight decay leaves out what their
states go by (`A_log`, `D`, `dt_bias`), as their own training code does; convolutions decay.

Kimi K2, Kimi Linear, Nemotron 3, MiMo and MiMo-V2-Flash name code of their own in their
directories, which is never run: they run by transformers' own, Kimi K2 and MiMo by that of
DeepSeek-V3 and of Qwen2, which theirs repeats. Published versions keep their `config.json`. The
`tiktoken.model` of Kimi and Moonlight is read as their code would, where no `tokenizer.json` is.

Mixtures of all families but Phi-3.5-MoE train by the experts that an engine chose, or that were
recorded ([routing replay](fsdp.md#routing-replay)), and the reference engine records them.

GLM-5 attends to the `index_topk` keys that an indexer chooses for each query, among those of its
row: trainers choose the same as engines, in float32 at least, and would have far other log-probs if
they did not. No gradient comes through that choice, so indexers are frozen: they stay as they were
loaded, bit for bit. Their weights are no targets of `lora`. Trainers have no kernel for it: rows of
more than `index_topk` tokens cost what dense attention does, and the indexer; shorter ones see all
of their keys, by the kernels of others, and run no indexer. An engine that scores by 8 bits, as
SGLang's, chooses other keys where scores are near, as does the reference engine in bfloat16, where
transformers rounds what weighs heads; of equal scores trainers take the first.

Families that see ([how](vision.md)) have four layers and a tower of three, and are shown images, in
rollouts too; *demo* stands where these are those of `make demo-vision`.

## On `fsdp`

{day}.

| family | `model_type` | packing | ranks | log-probs | gradients | norms | reloaded | rollout |
|---|---|---|---|---|---|---|---|---|
"""
REFUSALS = """
Any other `model_type` is refused as unproven, unless `fsdp.unproven: true` lets it in. These are
refused whatever is set:

| `model_type` | because |
|---|---|
"""
MEGATRON = """
## On `megatron`

{day}. The same measures, the largest of the layouts named: TP tensor, SP sequence, PP pipeline, CP
context, EP expert and DP data parallelism. More of them are in [megatron](megatron.md). Of families
that see *gradients* is a distance by the length of each part of the model, and *norms* is of one
step.

| family | `model_type` | layouts | log-probs | gradients | norms | reloaded | rollout |
|---|---|---|---|---|---|---|---|
"""
END = """
What `reference` trains is in [megatron](megatron.md), too.
"""


def days(measured: Iterable[str]) -> str:
    """The first and the last day of measuring."""
    found = sorted({*measured})
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def worst(proofs: list[dict[str, Any]]) -> list[str]:
    """The largest of each measure."""
    names = ("logprob", "gradient", "norm", "reloaded")
    return [f"{max(proof[name] for proof in proofs):.0e}" for name in names]


def megatron_row(case: dict[str, Any]) -> str:
    """One line of the table of Megatron's families."""
    proofs = case["megatron"]
    layouts = ", ".join(dict.fromkeys(proof["layout"] for proof in proofs))
    rollout = "demo" if case["model_type"] in IN_DEMO else "not measured"
    if "megatron_mismatch" in case:
        rollout = f"{case['megatron_mismatch']:.0e}"
    cells = [case["title"], f"`{case['model_type']}`", layouts, *worst(proofs), rollout]
    return "| " + " | ".join(cells) + " |"


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    proofs = case["proofs"]
    model_type = case["model_type"]
    rollout = f"{case['mismatch']:.0e}" if "mismatch" in case else "demo"
    rollout += " whole rows" if case.get("whole_rows") else ""
    cells = [
        case["title"],
        f"`{model_type}`",
        case["packing"],
        ", ".join(dict.fromkeys(proof.get("layout") or str(proof["ranks"]) for proof in proofs)),
        *worst(proofs),
        rollout,
    ]
    return "| " + " | ".join(cells) + " |"


def megatron_families() -> set[str]:
    """Of models that the backend trains, by the `model_type` without `_text`."""
    return {name.replace("3_5_vl", "3_5") for name in MEGATRON_FAMILIES}  # with the tower


def main() -> int:
    if not RESULTS.exists():
        print(f"models_table: there is no {RESULTS}; `make test-models` makes one", file=sys.stderr)
        return 1
    found = [*json.loads(RESULTS.read_bytes()).values()]
    cases = [case for case in found if case.keys() >= {"proofs", "packing"}]
    on_megatron = [case for case in found if "megatron" in case]
    missing = FAMILIES.keys() - {case["model_type"] for case in cases}
    missing |= megatron_families() - {c["model_type"].removesuffix("_text") for c in on_megatron}
    if missing:
        print(f"models_table: no run has {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    refused = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    lines = [*map(row, cases)]
    table = HEAD.format(day=days(case["day"] for case in cases)) + "\n".join(lines) + "\n"
    table += REFUSALS + "\n".join(refused) + "\n"
    table += MEGATRON.format(day=days(case["megatron_day"] for case in on_megatron))
    PAGE.write_text(table + "\n".join(map(megatron_row, on_megatron)) + "\n" + END)
    print(
        f"models_table: {len(cases)} models of {len(FAMILIES)} families on fsdp and "
        f"{len(on_megatron)} on megatron in {PAGE}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
