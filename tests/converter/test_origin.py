"""What training does not own comes from the origin; FP8 in both directions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sluice.weights.checkpoint import parse_header
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.hf import HfSource, fill_from_origin
from sluice.weights.convert.options import ConvertOptions, OptionError
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.quantization import dequantize, quantize
from sluice.weights.convert.quantized_layout import Fp8Blocks
from sluice.weights.convert.verify import compare
from sluice.weights.errors import InvalidCheckpointError, MissingTensorError, TensorDigestError
from sluice.weights.rules.packing import InexactTensorError
from sluice.weights.store import WeightStore
from tests.converter.test_damage import write_metadata
from tests.imported import import_checkpoint
from tests.unit.weights_rules.models import save_model

MTP = {
    "model.layers.4.eh_proj.weight": torch.full((32, 64), 0.5),
    "model.layers.4.mlp.gate_proj.weight": torch.full((48, 32), 0.25),
    "model.layers.4.embed_tokens.weight": torch.full((61, 32), 2.0),
}


def to_hf(source: Path, target: Path, **more: Any) -> Any:
    return convert(source, target, ConvertOptions(to="hf", sync=False, **more))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 with a layer of multi-token prediction, in bfloat16."""
    root = tmp_path_factory.mktemp("origin")
    save_model("deepseek_v3", root / "model")
    tensors = load_file(root / "model/model.safetensors")
    whole = {name: t.to(torch.bfloat16) for name, t in {**tensors, **MTP}.items()}
    save_file(whole, root / "model/model.safetensors")
    return root / "model"


@pytest.fixture(scope="module")
def trained(origin: Path) -> Path:
    target = origin.with_name("trained")
    made = convert(origin, target, ConvertOptions(vocab_multiple=8, sync=False))
    assert set(made.report.skipped) == set(MTP)
    return target


def test_what_is_not_trained_is_filled_in(origin: Path, trained: Path, tmp_path: Path) -> None:
    report = to_hf(trained, tmp_path / "back", origin=origin, max_file_bytes=50_000).report
    assert set(report.copied) == set(MTP)
    assert report.skipped == report.conflicting == {}
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_bytes())
    tensors = {}
    for file in set(index["weight_map"].values()):
        tensors |= load_file(tmp_path / "back" / file)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    expected = load_file(origin / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_without_an_origin_it_is_left_out(trained: Path, tmp_path: Path) -> None:
    report = to_hf(trained, tmp_path / "back").report
    assert not set(report.converted) & set(MTP)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back") is not None


def test_patterns_allow_and_deny(origin: Path, trained: Path, tmp_path: Path) -> None:
    more = {"allow": ("*.weight",), "deny": ("*.embed_tokens.*",)}
    report = to_hf(trained, tmp_path / "back", origin=origin, **more).report
    assert report.skipped == {"model.layers.4.embed_tokens.weight": "denied"}
    assert set(report.copied) == set(MTP) - set(report.skipped)
    report = to_hf(trained, tmp_path / "none", origin=origin, allow=("nothing",)).report
    assert set(report.skipped.values()) == {"not allowed"}
    assert report.copied == ()


def test_a_stale_copy_of_a_tied_tensor_is_not_taken(tmp_path: Path) -> None:
    """The origin's lm_head would be the embedding before training."""
    model = save_model("llama_tied", tmp_path / "model")
    convert(model, tmp_path / "trained", ConvertOptions(sync=False))
    tensors = load_file(model / "model.safetensors")
    copy = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(copy, model / "model.safetensors")
    report = to_hf(tmp_path / "trained", tmp_path / "back", origin=model).report
    assert report.skipped == {"lm_head.weight": "tied: it would be a stale copy"}
    assert "lm_head.weight" not in load_file(tmp_path / "back/model.safetensors")


def without_rules(directory: Path, **config: object) -> dict[str, torch.Tensor]:
    """Make the model one of an architecture that nobody has rules for; its tensors."""
    path = directory / "config.json"
    known = json.loads(path.read_bytes())
    for key, value in config.items():
        known.pop(key, None)
        if value is not None:
            known[key] = value
    path.write_text(json.dumps({**known, "architectures": ["StrangeForCausalLM"]}))
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("head", ["lm_head.weight", "model.proj_out.weight"])
@pytest.mark.parametrize(
    ("config", "equal"),
    [
        ({"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, False),
        ({"tie_word_embeddings": None}, True),  # the default of the class, which nobody knows
    ],
)
def test_a_stale_head_of_an_architecture_without_rules_is_not_taken(
    head: str, config: dict[str, object], equal: bool, tmp_path: Path
) -> None:
    model = save_model("llama_tied", tmp_path / "model")
    tensors = without_rules(model, **config)
    shutil.copytree(model, tmp_path / "trained")
    tensors[head] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    tensors["mtp.proj.weight"] = torch.ones(3, 5)
    save_file(tensors, model / "model.safetensors")
    report = to_hf(tmp_path / "trained", tmp_path / "made", origin=model).report
    assert report.skipped == {head: "tied: it would be a stale copy"}
    assert report.copied == ("mtp.proj.weight",)
    made = load_file(tmp_path / "made/model.safetensors")
    assert head not in made and torch.equal(made["mtp.proj.weight"], tensors["mtp.proj.weight"])


def test_a_head_of_its_own_is_taken_whatever_the_architecture(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    tensors = without_rules(model, tie_word_embeddings=False)
    shutil.copytree(model, tmp_path / "trained")
    headless = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(headless, tmp_path / "trained/model.safetensors")
    report = to_hf(tmp_path / "trained", tmp_path / "made", origin=model).report
    assert report.copied == ("lm_head.weight",)


@pytest.mark.parametrize("known", ["conversion.json", "manifest.json"])
def test_a_flipped_byte_of_an_origin_is_found(
    known: str, origin: Path, trained: Path, tmp_path: Path
) -> None:
    """As of a source: by the digests that its writer left beside it."""
    if known == "manifest.json":
        store = WeightStore(tmp_path / "store", durable=False)
        damaged = import_checkpoint(store, origin, None, 0).directory
    else:
        damaged = tmp_path / "origin"
        to_hf(origin, damaged)
    path = damaged / "model.safetensors"
    whole = path.read_bytes()
    report = to_hf(trained, tmp_path / "fine", origin=damaged).report
    assert set(report.copied) == set(MTP)
    for name in sorted(MTP):
        path.write_bytes(whole)
        flip_tensor(path, name)
        with pytest.raises(TensorDigestError, match=damaged.name) as found:
            to_hf(trained, tmp_path / "made", origin=damaged)
        assert found.value.name == name
        with pytest.raises(TensorDigestError):
            to_hf(damaged, tmp_path / "made")
        assert not (tmp_path / "made").exists()
    path.write_bytes(whole)
    flip_tensor(path, "model.norm.weight")  # which is not taken from there
    assert to_hf(trained, tmp_path / "again", origin=damaged).report.copied == report.copied


@pytest.mark.parametrize("quantize", ["", "fp8"])
def test_a_flipped_scale_of_an_origin_is_found(
    quantize: str, origin: Path, trained: Path, tmp_path: Path
) -> None:
    to_hf(origin, tmp_path / "fp8", quantize="fp8")
    flip_tensor(tmp_path / "fp8/model.safetensors", "model.layers.4.mlp.gate_proj.weight_scale_inv")
    with pytest.raises(TensorDigestError, match="weight_scale_inv"):
        to_hf(trained, tmp_path / "made", origin=tmp_path / "fp8", quantize=quantize)


def test_a_tensor_that_training_owns_is_not_filled_in(origin: Path, tmp_path: Path) -> None:
    """It would be the one before training, among others that were trained."""
    shutil.copytree(origin, tmp_path / "trained")
    tensors = load_file(origin / "model.safetensors")
    name = "model.layers.2.self_attn.o_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "trained/model.safetensors")
    with pytest.raises(MissingTensorError, match=name):
        to_hf(tmp_path / "trained", tmp_path / "made", origin=origin)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5_vl_moe"])
def test_a_tower_that_nobody_trained_is_filled_in(name: str, tmp_path: Path) -> None:
    """All of it; where the source has a part of one, the rest was lost."""
    model = save_model(name, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tower = {name for name in tensors if "visual." in name}
    language = {name: tensor for name, tensor in tensors.items() if name not in tower}
    shutil.copytree(model, tmp_path / "language")
    save_file(language, tmp_path / "language/model.safetensors")
    report = to_hf(tmp_path / "language", tmp_path / "made", origin=model).report
    assert set(report.copied) == tower and compare(model, tmp_path / "made").same
    with pytest.raises(MissingTensorError, match="visual"):
        to_hf(tmp_path / "language", tmp_path / "without")

    convert(model, tmp_path / "megatron", ConvertOptions(sync=False))
    drop_keys(tmp_path / "megatron", "vision_model.")
    report = to_hf(tmp_path / "megatron", tmp_path / "back", origin=model).report
    assert set(report.copied) == tower and compare(model, tmp_path / "back").same

    part = dict(sorted(tensors.items())[:-1]) | {"lm_head.weight": tensors["lm_head.weight"]}
    assert tower - part.keys()
    save_file(part, tmp_path / "language/model.safetensors")
    with pytest.raises(MissingTensorError, match="visual"):
        to_hf(tmp_path / "language", tmp_path / "lost", origin=model)

    save_file(language, tmp_path / "language/model.safetensors")
    del tensors[sorted(tower)[0]]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(MissingTensorError, match=sorted(tower)[0]):
        to_hf(tmp_path / "language", tmp_path / "both", origin=model)


def flip_tensor(path: Path, name: str) -> None:
    """Flip a bit in the middle of a tensor."""
    data = bytearray(path.read_bytes())
    extent = parse_header(bytes(data), file_name=path.name)[name]
    data[(extent.begin + extent.end) // 2] ^= 1
    path.write_bytes(data)


def drop_keys(directory: Path, prefix: str) -> None:
    """Rewrite a torch_dist checkpoint of anybody without the keys that begin so."""
    (directory / "conversion.json").unlink()
    metadata = dcp.FileSystemReader(directory).read_metadata()
    kept = [key for key in metadata.state_dict_metadata if not key.startswith(prefix)]
    metadata.state_dict_metadata = {key: metadata.state_dict_metadata[key] for key in kept}
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if index.fqn in kept
    }
    write_metadata(directory, metadata)


def test_conflicts_are_reported_and_the_trained_one_kept(
    origin: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(origin, tmp_path / "other")
    tensors = load_file(origin / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, tmp_path / "other/model.safetensors")
    report = to_hf(trained, tmp_path / "back", origin=tmp_path / "other").report
    assert report.conflicting == {"model.norm.weight": "(7,) in the origin, (32,) converted"}
    assert load_file(tmp_path / "back/model.safetensors")["model.norm.weight"].shape == (32,)


@pytest.mark.parametrize(
    ("number", "more"), [(1e38, {"dtype": "float16"}), (float("inf"), {"quantize": "fp8"})]
)
def test_numbers_that_a_narrow_type_cannot_hold_are_refused(
    number: float, more: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    to_hf(trained, tmp_path / "wide")
    (tmp_path / "wide/conversion.json").unlink()
    tensors = load_file(tmp_path / "wide/model.safetensors")
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors[name][3, 5] = number
    save_file(tensors, tmp_path / "wide/model.safetensors")
    with pytest.raises(InexactTensorError, match=name):
        to_hf(tmp_path / "wide", tmp_path / "narrow", **more)
    assert not (tmp_path / "narrow").exists()


def test_fp8_of_the_smallest_numbers_is_a_number() -> None:
    weight = torch.zeros(128, 128)
    weight[0, 0] = 1e-44
    assert torch.isfinite(dequantize(quantize(weight, Fp8Blocks()), Fp8Blocks())).all()


def test_fp8_out_and_in(origin: Path, trained: Path, tmp_path: Path) -> None:
    to_hf(trained, tmp_path / "fp8", origin=origin, quantize="fp8")
    tensors = load_file(tmp_path / "fp8/model.safetensors")
    plain = load_file(origin / "model.safetensors")
    quantized = {n for n, t in tensors.items() if t.dtype is torch.float8_e4m3fn}
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in quantized
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in quantized
    assert not any(
        word in name for name in quantized for word in ("norm", "embed", "gate.", "head")
    )
    assert tensors.keys() == plain.keys() | {f"{name}_scale_inv" for name in quantized}
    config = json.loads((tmp_path / "fp8/config.json").read_bytes())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert "lm_head" in config["modules_to_not_convert"]
    for name in quantized:
        back = dequantize([tensors[name], tensors[f"{name}_scale_inv"]], Fp8Blocks()).float()
        assert (back - plain[name].float()).abs().max() <= plain[name].float().abs().max() / 14
    convert(tmp_path / "fp8", tmp_path / "again", ConvertOptions(vocab_multiple=8, sync=False))
    to_hf(tmp_path / "again", tmp_path / "bf16")
    read = load_file(tmp_path / "bf16/model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    parts = [tensors[name], tensors[f"{name}_scale_inv"]]
    assert torch.equal(read[name], dequantize(parts, Fp8Blocks()))
    report = to_hf(trained, tmp_path / "filled", origin=tmp_path / "fp8").report
    assert set(report.copied) == set(MTP)  # as numbers: no scale is left over
    assert not any(
        n.endswith("_scale_inv") for n in load_file(tmp_path / "filled/model.safetensors")
    )


@settings(max_examples=30)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    scales=st.sampled_from(["float32", "ue8m0"]),
    seed=st.integers(0, 2**31),
)
def test_blocks_keep_three_bits(
    rows: int, columns: int, exponent: int, scales: Any, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight = weight * 2.0**exponent
    weight[:128, :128] *= seed % 2  # a block of zeros, at times
    stored, scale = quantize(weight, Fp8Blocks(scale_format=scales))
    assert scale.shape == Fp8Blocks().scale_shape((rows, columns))
    assert torch.isfinite(scale).all() and torch.isfinite(stored.float()).all()
    if scales == "ue8m0":
        assert torch.equal(scale.log2(), scale.log2().round())
    spread = scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (stored.double() * spread - weight.double()).abs()
    assert (error <= weight.double().abs() / 16 + spread * 2**-9).all()


def test_other_quantisations_are_refused(origin: Path, tmp_path: Path) -> None:
    shutil.copytree(origin, tmp_path / "int4")
    config = json.loads((origin / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "int4/config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidCheckpointError, match="gptq"):
        convert(tmp_path / "int4", tmp_path / "target", ConvertOptions(sync=False))


def test_old_names_of_a_vision_model(tmp_path: Path) -> None:
    """Prefixes changed over time; both are the same tensors, and not two of each."""
    model = save_model("qwen2_5_vl", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    renamed = {
        (f"model.{n}" if n.startswith("visual.") else n).replace(
            "model.layers", "model.language_model.layers"
        ): t
        for n, t in tensors.items()
    }
    shutil.copytree(model, tmp_path / "old")
    save_file(renamed, tmp_path / "old/model.safetensors")
    convert(tmp_path / "old", tmp_path / "made", ConvertOptions(sync=False))
    report = to_hf(tmp_path / "made", tmp_path / "back", origin=tmp_path / "old").report
    assert report.copied == ()
    assert compare(model, tmp_path / "back").same


def test_stacked_experts_stay_stacked(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 exist in both forms; a conversion keeps the one that it found."""
    model = save_model("qwen3_5_vl_moe", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        parts = [
            {k: tensors.pop(f"{prefix}{e}.{k}_proj.weight") for k in ("gate", "up", "down")}
            for e in range(4)
        ]
        fused = [torch.cat([part["gate"], part["up"]]) for part in parts]
        tensors[f"{prefix}gate_up_proj"] = torch.stack(fused)
        tensors[f"{prefix}down_proj"] = torch.stack([part["down"] for part in parts])
    shutil.copytree(model, tmp_path / "stacked")
    save_file(tensors, tmp_path / "stacked/model.safetensors")
    convert(tmp_path / "stacked", tmp_path / "made", ConvertOptions(sync=False))
    assert compare(model, tmp_path / "made").same  # the same tensors of Megatron
    to_hf(tmp_path / "made", tmp_path / "back")
    assert compare(tmp_path / "stacked", tmp_path / "back").same
    assert load_file(tmp_path / "back/model.safetensors").keys() == tensors.keys()
    report = to_hf(tmp_path / "stacked", tmp_path / "filled", origin=model).report
    assert report.copied == ()  # the experts before training, under other names
    assert load_file(tmp_path / "filled/model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ConvertOptions(quantize="fp8"), "for HF"),
        (ConvertOptions(origin=Path("x")), "for HF"),
        (ConvertOptions(workers=0), "at least 1"),
        (ConvertOptions(to="hf", quantize="fp8", dtype="float16"), "bfloat16"),
    ],
)
def test_options_that_mean_nothing(
    options: ConvertOptions, text: str, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=text):
        convert(trained, tmp_path / "target", options)


def test_the_options_in_a_record_keep_their_names() -> None:
    """Else a conversion that an earlier release made, or began, would count as another one."""
    options = ConvertOptions(
        to="hf", model=Path("/m"), deny=["b*"], quantize="fp8_ue8m0", plain_norms=True, workers=7
    )
    assert options.describe() == {
        "target_format": "hf",
        "dtype": "keep",
        "model": "/m",
        "origin": None,
        "allow": ["*"],
        "deny": ["b*"],
        "quantize": True,
        "scale_format": "ue8m0",
        "layout": {"tensor": 1, "pipeline": 1, "expert": 1},
        "vocab_multiple": 128,
        "stacking": "auto",
        "fused_norms": False,
        "max_file_bytes": 0,
    }


def test_names_of_an_origin_are_listed_as_often_however_many_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, names = list[str](), HfSource.names
    monkeypatch.setattr(HfSource, "names", lambda self: listed.append("") or names(self))

    def lists(count: int) -> int:
        directory = tmp_path / str(count)
        directory.mkdir()
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        (directory / "config.json").write_text(json.dumps(config))
        tensors = dict[str, torch.Tensor]()
        for number in range(count):
            tensors[f"w{number}.weight"] = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
            tensors[f"w{number}.weight_scale_inv"] = torch.ones(1, 1)
        save_file(tensors, directory / "model.safetensors")
        with Files() as files:
            origin = HfSource(directory, files)
            before = len(listed)
            _, report = fill_from_origin([], origin, ConvertOptions(to="hf"), None, {})
        assert report.skipped == {
            f"w{number}.weight_scale_inv": "scale: the numbers are copied unquantised"
            for number in range(count)
        }
        return len(listed) - before

    assert lists(30) == lists(3)


def test_more_files_than_a_process_begins_with_are_compared(tmp_path: Path) -> None:
    for side in ("one", "other"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "config.json").write_text("{}")
        index = {f"w{number}": f"model-{number}.safetensors" for number in range(150)}
        for name, file in index.items():
            save_file({name: torch.zeros(1)}, tmp_path / side / file)
        document = json.dumps({"weight_map": index})
        (tmp_path / side / "model.safetensors.index.json").write_text(document)
    command = [sys.executable, "-m", "sluice", "verify", tmp_path / "one", tmp_path / "other"]
    limited = ["sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh", *command]
    told = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
