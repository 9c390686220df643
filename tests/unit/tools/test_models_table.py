"""The page of families is written of what runs have shown, and of all families or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.backends.families import FAMILIES
from tools import models_table

PROOF = {"ranks": 2, "logprob": 1e-6, "gradient": 2e-6, "norm": 3e-6, "reloaded": 4e-6}
ON_MEGATRON = [{**PROOF, "layout": "TP2+SP"}, {**PROOF, "layout": "PP2", "norm": 9e-4}]
Results = dict[str, dict[str, Any]]


@pytest.fixture
def results() -> Results:
    on_fsdp = {"proofs": [PROOF], "mismatch": 5e-6, "packing": "rows", "whole_rows": False}
    on_fsdp |= {"day": "2026-11-02"}
    found = {name: {"title": name, "model_type": name, **on_fsdp} for name in FAMILIES}
    for name in models_table.megatron_families():
        model_type = name + "_text" * name.startswith("qwen3_5")
        facts = found.setdefault(model_type, {"title": name, "model_type": model_type})
        facts |= {"megatron": ON_MEGATRON, "megatron_mismatch": 7e-6}
        facts |= {"megatron_day": "2026-11-03"}
    cut = {**PROOF, "ranks": 4, "layout": "DP2xTP2"}
    found["llama"] |= {"day": "2026-11-01", "proofs": [PROOF, cut]}
    return found


def write(results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    (tmp_path / "models.json").write_text(json.dumps(results))
    monkeypatch.setattr(models_table, "RESULTS", tmp_path / "models.json")
    monkeypatch.setattr(models_table, "PAGE", tmp_path / "models.md")
    return models_table.main()


def test_both_backends_have_their_families(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert write(results, monkeypatch, tmp_path) == 0
    _, fsdp, megatron = (tmp_path / "models.md").read_text().split("\n## ")
    assert "\n2026-11-01 to 2026-11-02." in fsdp  # of the oldest row and of the newest
    assert "\n2026-11-03." in megatron
    for name in FAMILIES:
        ranks = "2, DP2xTP2" if name == "llama" else "2"
        assert f"| `{name}` | rows | {ranks} | 1e-06 | 2e-06 | 3e-06 | 4e-06 | 5e-06 |" in fsdp
    for name in ("glm4", "qwen3_5_moe_text", "qwen3_vl"):
        row = f"| `{name}` | TP2+SP, PP2 | 1e-06 | 2e-06 | 9e-04 | 4e-06 | 7e-06 |"
        assert row in megatron


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_text", "deepseek_v3"])
def test_a_family_of_megatron_that_no_run_showed_is_named(
    name: str,
    results: Results,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del results[name]["megatron"]
    assert write(results, monkeypatch, tmp_path) == 1
    assert f"no run has {name.removesuffix('_text')}" in capsys.readouterr().err
    assert not (tmp_path / "models.md").exists()
