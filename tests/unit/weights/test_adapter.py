"""What describes an adapter is peft's own form, and nothing malformed or foreign gets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sluice.weights.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdapterSpec,
    decode_adapter_config,
    encode_adapter_config,
    matched_layers,
    tensor_names,
)
from sluice.weights.checkpoint import companion_files, digest_base
from sluice.weights.errors import InvalidAdapterError, OtherBaseError
from sluice.weights.shards import write_shard
from sluice.weights.store import WeightStore

DIGEST = "0123456789abcdef" * 2
SPEC = AdapterSpec(rank=2, alpha=6.0, targets=("q_proj", "down_proj"), base_digest=DIGEST)
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", (2, 8)),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": ("F32", (12, 2)),
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": ("BF16", (2, 16)),
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": ("BF16", (8, 2)),
}


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
        )
    ).eval()


def changed(**values: Any) -> bytes:
    return json.dumps(json.loads(encode_adapter_config(SPEC)) | values).encode()


def test_a_spec_survives_its_file() -> None:
    assert decode_adapter_config(encode_adapter_config(SPEC)) == SPEC
    assert decode_adapter_config(encode_adapter_config(SPEC), DIGEST) == SPEC
    assert SPEC.targets == ("down_proj", "q_proj")  # one form, whatever the order
    assert SPEC.scale == 3.0


def test_what_peft_writes_is_read_and_what_we_write_peft_reads(tmp_path: Path) -> None:
    settings = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    theirs = get_peft_model(tiny_model(), settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    theirs.save_pretrained(tmp_path / "theirs")
    spec = decode_adapter_config((tmp_path / "theirs" / ADAPTER_CONFIG).read_bytes(), DIGEST)
    assert spec == SPEC

    tensors = load_file(tmp_path / "theirs" / ADAPTER_FILE)
    layers = spec.check_tensors({n: ("F32", tuple(t.shape)) for n, t in tensors.items()})
    assert {name for layer in layers for name in tensor_names(layer)} == tensors.keys()

    (tmp_path / "ours").mkdir()
    save_file(tensors, tmp_path / "ours" / ADAPTER_FILE)
    (tmp_path / "ours" / ADAPTER_CONFIG).write_bytes(encode_adapter_config(spec))
    ours = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "ours"))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        wanted, got = theirs(ids).logits, ours(ids).logits
        assert torch.equal(wanted, got)
        assert not torch.allclose(wanted, tiny_model()(ids).logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("bias", "all"),
        ("use_dora", True),
        ("use_rslora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("layers_to_transform", [1]),
        ("init_lora_weights", "pissa"),
        ("target_modules", "all-linear"),
        ("target_modules", []),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", ["self_attn.q_proj"]),
        ("target_modules", ["../q_proj"]),
        ("target_modules", ["q\0"]),
        ("target_modules", ["q" * 5000]),
        ("target_modules", ["q_proj", "q_proj"]),
        ("r", 0),
        ("r", -1),
        ("r", True),
        ("r", 2.0),
        ("r", 1 << 17),
        ("r", None),
        ("lora_alpha", 0),
        ("lora_alpha", -1.0),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 1e308),
        ("lora_alpha", "2"),
        ("base_model_name_or_path", "sluice:"),
        ("base_model_name_or_path", "sluice:" + "g" * 32),
        ("base_model_name_or_path", "meta-llama/Llama-3.2-1B"),
    ],
)
def test_what_it_does_not_know_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidAdapterError) as refused:
        decode_adapter_config(changed(**{name: value}))
    assert len(str(refused.value)) < 300


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_other_content_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidAdapterError):
        decode_adapter_config(data)


def test_every_cut_of_the_file_is_refused() -> None:
    data = encode_adapter_config(SPEC)
    for end in range(len(data) - 2):
        with pytest.raises(InvalidAdapterError):
            decode_adapter_config(data[:end])


def test_another_base_is_refused_by_its_digest() -> None:
    other = "f" * 32
    with pytest.raises(OtherBaseError, match=f"of digest {DIGEST}, not {other}"):
        decode_adapter_config(encode_adapter_config(SPEC), other)
    with pytest.raises(OtherBaseError):
        SPEC.check_base(other)


def test_the_layers_of_an_adapter() -> None:
    assert SPEC.check_tensors(TENSORS) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
    ]


Q = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "entry", "reason"),
    [
        (Q + "lora_A.weight", ("F32", (3, 8)), "which is not of rank 2"),
        (Q + "lora_A.weight", ("F32", (2, 8, 1)), "which is not of rank 2"),
        (Q + "lora_A.weight", ("F32", (2, 0)), "which is not of rank 2"),
        (Q + "lora_B.weight", ("F32", (2, 12)), "which is not of rank 2"),
        (Q + "lora_A.weight", ("I8", (2, 8)), "dtype 'I8'"),
        (Q + "lora_A.weight", None, "has no lora_A"),
        (Q + "lora_B.weight", None, "has no lora_B"),
        (Q + "lora_C.weight", ("F32", (2, 8)), "is none of an adapter"),
        (Q + "lora_A.default.weight", ("F32", (2, 8)), "is none of an adapter"),
        (Q + "weight", ("F32", (2, 8)), "is none of an adapter"),
        ("lora_A.weight", ("F32", (2, 8)), "is none of an adapter"),
        ("model.x.q_proj.lora_A.weight", ("F32", (2, 8)), "is none of an adapter"),
        ("base_model.model.x.k_proj.lora_A.weight", ("F32", (2, 8)), "is no target"),
    ],
)
def test_tensors_of_another_adapter_are_named(
    name: str, entry: tuple[str, tuple[int, ...]] | None, reason: str
) -> None:
    tensors = {n: e for n, e in (TENSORS | {name: entry}).items() if e is not None}
    with pytest.raises(InvalidAdapterError, match=reason):
        SPEC.check_tensors(tensors)


def test_a_target_without_tensors_is_named() -> None:
    tensors = {name: entry for name, entry in TENSORS.items() if "q_proj" in name}
    with pytest.raises(InvalidAdapterError, match="no tensor is of target 'down_proj'"):
        SPEC.check_tensors(tensors)
    with pytest.raises(InvalidAdapterError, match="no tensor is of target"):
        SPEC.check_tensors({})


def test_targets_that_no_layer_is_called_are_named() -> None:
    layers = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    assert matched_layers(layers, ["up_proj"]) == layers[:2]
    with pytest.raises(InvalidAdapterError, match=r"'q_prj', which .* they are: lm_head, up_proj"):
        matched_layers(layers, ["up_proj", "q_prj"])


def test_a_base_has_the_digest_of_the_version_that_it_is(
    checkpoint: Path, store: WeightStore, tensors: dict[str, torch.Tensor]
) -> None:
    staging = store.allocate(None)
    names = sorted(tensors)
    shards = [
        write_shard(staging.directory, f"{part}.safetensors", {n: tensors[n] for n in share})
        for part, share in (("a", names[:1]), ("b", names[1:]))
    ]
    record = store.commit(staging, shards, companion_files(checkpoint), step=0)
    assert digest_base(checkpoint) == digest_base(record.directory) == record.digest
    tensors["norm.weight"][2] += 1
    save_file(tensors, checkpoint / "model.safetensors")
    assert digest_base(checkpoint) != record.digest
