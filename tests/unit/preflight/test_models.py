"""`sluice check` of models: what their directories lack, and what backends and engines refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sluice.model_types import check_chosen
from tests.unit.preflight.conftest import Files

EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def backend(name: str, ranks: int = 1, **settings: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        own = {name: settings} if settings else {}
        files.trainer.update(backend=name, ranks={"count": ranks}, **own)

    return change


def model(**settings: Any) -> Callable[[Files], None]:
    return lambda files: files.set_model(**settings)


def both(*changes: Callable[[Files], None]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for each in changes:
            each(files)

    return change


def without(name: str) -> Callable[[Files], None]:
    return lambda files: (files.model / name).unlink()


def with_template(text: str | None) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        path = files.model / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings.pop("chat_template", None)
        path.write_text(json.dumps(settings | ({"chat_template": text} if text else {})))
        files.run["environment"] = {"name": "prompts", "settings": {"chat": True}}

    return change


def quantised(files: Files) -> None:
    """As gpt-oss is published, but for what config.json says of it."""
    path = files.model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"] = np.zeros((2, 4, 1, 16), np.uint8)
    tensors["model.layers.0.mlp.experts.gate_up_proj_scales"] = np.zeros((2, 4, 1), np.uint8)
    save_file(tensors, path)


CASES: dict[str, tuple[Callable[[Files], None], str]] = {
    "no directory": (
        lambda files: files.trainer.update(model="Qwen/Qwen3-0.6B"),
        r"trainer: model: Qwen/Qwen3-0.6B is no model directory.*hf download",
    ),
    "an empty config.json": (
        lambda files: (files.model / "config.json").write_text("{}"),
        r"trainer: model: .*config.json has no num_hidden_layers, which a model needs",
    ),
    "no weights": (without("model.safetensors"), r"trainer: model: .*model.safetensors"),
    "damaged weights": (
        lambda files: (files.model / "model.safetensors").write_bytes(b"version https://git-lfs"),
        r"trainer: model: .*model.safetensors",
    ),
    "a family": (
        model(model_type="gpt2", n_head=4, n_embd=32, n_layer=2),
        r"trainer: model_type gpt2 is unknown here; known: .*fsdp",
    ),
    "a family on fsdp": (
        both(backend("fsdp"), model(model_type="bloom", n_head=4)),
        r"trainer: model_type bloom cannot be trained: it takes positions from a mask",
    ),
    "a family on megatron": (
        both(
            backend("megatron"),
            model(model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"]),
        ),
        r"trainer: no weight rules for 'Qwen2MoeForCausalLM'",
    ),
    "biases on some layers": (
        both(
            backend("megatron"),
            model(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=True),
        ),
        r"trainer: attention_bias is true in config.json, and MLPs have no biases: .* backend: fs",
    ),
    "quantised weights that nobody tells of": (
        quantised,
        r"trainer: .*has quantised weights, and a config.json that knows of none",
    ),
    "a quantised model": (
        model(quantization_config={"quant_method": "mxfp4"}),
        r"trainer: model .* is quantised, and trained weights are not",
    ),
    "more experts chosen than there are": (
        model(num_experts=4, num_experts_per_tok=8, **EXPERTS),
        r"trainer: model: config.json has tokens go to 8 experts, and a layer has 4",
    ),
    "ranks of fsdp": (
        backend("fsdp", ranks=3, tensor=2),
        r"trainer: ranks.count: 3 ranks do not divide into fsdp.tensor 2",
    ),
    "ranks of megatron": (
        backend("megatron", ranks=3, tensor=2),
        r"trainer: ranks.count: 3 ranks do not divide into tensor 2",
    ),
    "heads": (
        both(backend("fsdp", ranks=3, tensor=3)),
        r"trainer: fsdp.tensor 3 does not divide num_attention_heads \d",
    ),
    "layers": (
        backend("megatron", ranks=5, pipeline=5),
        r"trainer: \d layers do not divide into 5 pipeline chunks",
    ),
    "experts that are none": (
        backend("fsdp", ranks=2, expert=2),
        r"trainer: fsdp.expert has no effect on .*, which has no experts",
    ),
    "rotation by the longest row": (
        model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        r"trainer: rope_type dynamic has other angles .*set max_tokens_per_micro_batch to",
    ),
    "dropout": (
        both(backend("fsdp", activation_checkpointing=True), model(attention_dropout=0.1)),
        r"trainer: fsdp.activation_checkpointing with attention_dropout above 0 in config.json",
    ),
    "no tokenizer": (without("tokenizer.json"), r"rollout: tokenizer: .*tokenizer.json does not"),
    "no chat template": (
        with_template(None),
        r"prompts: 40 of the 40 tasks looked at cannot be made: .*has no chat template",
    ),
    "a chat template that refuses": (
        with_template("{{ raise_exception('no users') }}"),
        r"prompts: 40 of the 40 .*chat template: no users",
    ),
    "an engine's own model": (
        lambda files: files.rollout["engine"].update(model="none"),
        r"rollout: engine.model: none is no model directory",
    ),
    "an engine that is shown longer rows": (
        model(
            rope_scaling={
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
            }
        ),
        r"rollout: engine: rope_type longrope .*does not serve it",
    ),
    "routed experts of a dense model": (
        lambda files: files.rollout["engine"].update(routed_experts=True),
        r"rollout: engine: model_type qwen3 has no experts; leave routed_experts off",
    ),
    "no SGLang": (
        lambda files: files.rollout["engine"].update(backend="sglang"),
        r"rollout: engine.sglang.python: .* has no SGLang; name an interpreter",
    ),
    "adapters that SGLang is not started for": (
        lambda files: (
            files.trainer.update(lora={"rank": 32}),
            files.rollout["engine"].update(backend="sglang"),
        ),
        r"rollout: what the trainer publishes is an adapter, .*set engine.sglang.lora",
    ),
    "adapters of a larger rank": (
        lambda files: (
            files.trainer.update(lora={"rank": 32}),
            files.rollout["engine"].update(backend="sglang", sglang={"lora": {"max_rank": 8}}),
        ),
        r"rollout: what the trainer publishes is of rank 32, .*at most 8 \(engine.sglang.lora",
    ),
    "another vocabulary": (
        lambda files: files.rollout.update(tokenizer=str(_other_tokenizer(files))),
        r"wrong rollout: tokenizer: the episode worker rollout has another vocabulary",
    ),
}


def _other_tokenizer(files: Files) -> Path:
    folder = files.folder / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer_config.json", "config.json"):
        (folder / name).write_text((files.model / name).read_text())
    values = json.loads((files.model / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_model_is_told(files: Files, case: str) -> None:
    change, expected = CASES[case]
    change(files)
    found = files.faults()
    assert any(re.search(expected, each) for each in found), found


@pytest.mark.parametrize(
    "change",
    [
        backend("fsdp", ranks=2, dtype="float32"),
        backend("fsdp", ranks=2, tensor=2),
        backend("megatron", ranks=2, tensor=2, sequence_parallel=True),
        backend("megatron", ranks=2, pipeline=2),
        lambda files: files.trainer.update(lora={"rank": 4}),
        lambda files: files.rollout["engine"].update(model=str(files.model)),
        with_template("{{ messages[0].content }}"),
    ],
)
def test_models_and_ranks_that_fit_have_nothing_to_tell(
    files: Files, change: Callable[[Files], None]
) -> None:
    change(files)
    assert [each for each in files.faults() if "megatron, which is not installed" not in each] == []


def test_all_that_a_backend_refuses_is_told(files: Files) -> None:
    backend("fsdp", ranks=3, tensor=3, routing_replay="rollout", activation_checkpointing=True)(
        files
    )
    files.set_model(attention_dropout=0.1)
    found = "\n".join(files.wrong())
    for expected in (
        "fsdp.tensor 3 does not divide num_attention_heads",
        "fsdp.activation_checkpointing with attention_dropout",
        "fsdp.routing_replay: model_type qwen3 has no experts",
    ):
        assert expected in found


def test_a_mixture_that_chooses_more_than_it_has_is_refused_by_who_computes_by_it() -> None:
    check_chosen({"num_experts": 8, "num_experts_per_tok": 8})
    check_chosen({"num_experts_per_tok": 2})  # of a dense model that has the key all the same
    check_chosen({"text_config": {"num_local_experts": 4, "num_experts_per_tok": 4}})
    with pytest.raises(ValueError, match="tokens go to 5 experts, and a layer has 4"):
        check_chosen({"text_config": {"num_local_experts": 4, "num_experts_per_tok": 5}})


def test_services_are_looked_at_where_the_run_is_not_whole(files: Files) -> None:
    del files.run["sampling"]
    (files.model / "tokenizer.json").unlink()
    found = files.faults()
    assert any(each.startswith("wrong run.yaml: sampling: Field required") for each in found)
    assert any(re.search(r"rollout: tokenizer: .*tokenizer.json does not", each) for each in found)
