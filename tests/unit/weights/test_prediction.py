"""Which names are of layers of multi-token prediction."""

from __future__ import annotations

import pytest

from sluice.weights.prediction import predicts

PLAIN = {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("mtp.fc.weight", {}, True),
        ("model.mtp.layers.0.mlp.gate.weight", {}, True),
        ("model.layers.2.eh_proj.weight", PLAIN, True),
        ("model.layers.1.mlp.gate.weight", PLAIN, False),
        ("model.layers.10.enorm.weight", PLAIN, True),
        ("model.language_model.layers.2.enorm.weight", {"text_config": PLAIN}, True),
        ("model.layers.2.eh_proj.weight", {}, False),
        ("model.layers.2.eh_proj.weight", {"text_config": None}, False),
        ("vision_tower.encoder.layers.26.norm.weight", PLAIN, False),
        ("model.visual.blocks.7.norm.weight", PLAIN, False),
        ("lm_head.weight", PLAIN, False),
        ("smtp.fc.weight", PLAIN, False),
        ("mtp.", PLAIN, False),
    ],
)
def test_names(name: str, config: dict[str, object], expected: bool) -> None:
    assert predicts(name, config) is expected
