"""Rewrites docs/models.md from what `make test-models` measured: `python -m tools.models_table`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.trainer.backends.fsdp.families import FAMILIES, REFUSED

RESULTS, PAGE = Path("build/models.json"), Path("docs/models.md")
HEAD = """# Models

Written by `make models-table`: families that the backend `fsdp` trains ([how](fsdp.md)), each as a
tiny random model of two layers, against plain transformers, one sample at a time. Two processors,
no accelerator, float32, gloo, {day}.

- *log-probs*: largest difference; *gradients*: largest difference by the largest element of its
  tensor; *norms*: largest relative difference of the gradient norm in five AdamW steps.
- *reloaded*: log-probs of the published files in transformers, beside those of the trainer.
- *rollout*: largest difference between the log-probs of the reference engine and of the trainer in
  three steps of GRPO, with weights published in between. *whole rows* marks models whose attention
  the engine does not know: it runs a sample's whole row for every token, which is right and slow.
- *packing*: `shared` encodes a prompt of several rows once, `rows` gives every row its own; a model
  with a window is packed by rows whatever its family.

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
What `megatron` and `reference` train is in [megatron](megatron.md).
"""


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    proofs = case["proofs"]

    def worst(name: str) -> str:
        return f"{max(proof[name] for proof in proofs):.0e}"

    model_type = case["model_type"]
    rollout = f"{case['mismatch']:.0e}" + (" whole rows" if case["whole_rows"] else "")
    cells = [
        case["title"],
        f"`{model_type}`",
        case["packing"],
        ", ".join(str(proof["ranks"]) for proof in proofs),
        *(worst(name) for name in ("logprob", "gradient", "norm", "reloaded")),
        rollout,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    if not RESULTS.exists():
        print(f"models_table: there is no {RESULTS}; `make test-models` makes one", file=sys.stderr)
        return 1
    found = json.loads(RESULTS.read_bytes()).values()
    cases = [case for case in found if case.keys() >= {"proofs", "mismatch"}]
    if missing := FAMILIES.keys() - {case["model_type"] for case in cases}:
        print(f"models_table: no run has {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    refused = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    lines = [*map(row, cases)]
    day = datetime.fromtimestamp(RESULTS.stat().st_mtime, UTC).date()
    table = HEAD.format(day=day) + "\n".join(lines) + "\n"
    PAGE.write_text(table + REFUSALS + "\n".join(refused) + "\n" + MEGATRON)
    print(f"models_table: {len(cases)} models of {len(FAMILIES)} families in {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
