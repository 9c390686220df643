"""Configurations of types that transformers has not are of those that run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sluice.model_types import SAME_AS, read_config


@pytest.mark.parametrize("kind", SAME_AS)
def test_a_type_is_the_one_that_runs_it(kind: str, tmp_path: Path) -> None:
    said = {"hidden_size": 96, "rope_theta": 5e5, "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps({**said, "model_type": kind}))
    found = read_config(tmp_path).to_dict()
    plain = {**said, "model_type": SAME_AS[kind]}
    del plain["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    expected = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {**found, "_name_or_path": str(tmp_path)} == expected
    assert (found["model_type"], found["hidden_size"]) == (SAME_AS[kind], 96)


@pytest.mark.parametrize("said", [[], {}, "text", {"model_type": 3}, {"model_type": "x"}])
def test_what_is_no_configuration_is_refused_as_by_transformers(said: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises((OSError, ValueError)) as expected:
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(expected.type) as found:
        read_config(tmp_path)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("kind", ["qwen2", "mimo"])
def test_a_value_of_another_type_is_refused_by_its_key(kind: str, tmp_path: Path) -> None:
    """What transformers raises then is no ValueError, and has two lines."""
    said = {"model_type": kind, "hidden_size": 96, "hidden_act": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"^config.json: [^\n]*'hidden_act' expected str[^\n]*$"):
        read_config(tmp_path)
