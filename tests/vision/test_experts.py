"""Experts of Qwen3-VL-MoE, however a checkpoint stores them: as published, or as transformers does.

Of square ones transformers itself cannot tell; those that it wrote it reads right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import PauseMode, create_engine
from services.trainer.backend import Mesh
from services.trainer.backends.megatron import upstream
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from services.trainer.errors import UnquantizableWeightsError
from services.trainer.rank.quantization import quantizing
from sluice.config import parse_config
from sluice.weights.checkpoint import companion_files
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.quantized_layout import Fp8Blocks
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.host_cache import HostCache
from sluice.weights.rules.shape import read_shape
from sluice.weights.rules.weight_map import WeightMap, family_of
from sluice.weights.shards import PublishedShards
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.megatron.comparison import read_ranks
from tests.rank_pool import Pool
from tests.unit.weights_rules.models import exchanged
from tests.vision.asking import check, followed, request, rows_and_images, sample
from tests.vision.cases import (
    MAX_LOGPROB_DIFF,
    PPO,
    Model,
    Oracle,
    build_model,
    mixed_rows,
    record,
)

fast = pytest.mark.fast
FAMILY, FILE = "qwen3_vl_moe", "model.safetensors"
Tensors = dict[str, torch.Tensor]
# hidden size 64: with these widths no tensor of experts is square, or one of the two is
WIDTHS = {24: "oblong", 32: "square gate_up_proj", 64: "square down_proj"}


@dataclass(frozen=True)
class Stored:
    """One model, stored both ways."""

    published: Model
    straight: Model

    def read_by_transformers(self, tensors: Tensors, folder: Path, *, straight: bool) -> Oracle:
        """Other weights of it, stored either way, in plain transformers."""
        shutil.copytree(self.straight.directory, folder)
        found = tensors if straight else exchanged(tensors)
        save_file(found, folder / FILE, {"format": "pt"})
        return Oracle(Model(folder))


@pytest.fixture(scope="module", params=WIDTHS, ids=WIDTHS.get)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    root = tmp_path_factory.mktemp("stored")
    sizes = {"moe_intermediate_size": request.param}
    published = build_model(root / "published", FAMILY, **sizes)
    straight = Model(shutil.copytree(published.directory, root / "straight"))
    tensors = exchanged(load_file(published.directory / FILE))
    save_file(tensors, straight.directory / FILE, {"format": "pt"})
    return Stored(published, straight)


@pytest.fixture(params=["published", "straight"])
def model(request: pytest.FixtureRequest, stored: Stored) -> Model:
    found: Model = getattr(stored, request.param)
    return found


def logprobs_by(oracle: Oracle) -> Tensors:
    return {row.sample_id: oracle.logprobs(row).detach() for row in mixed_rows(oracle.rules)}


def agree(found: Tensors, expected: Tensors, layout: str) -> None:
    assert found.keys() == expected.keys()
    for name, logprobs in expected.items():
        difference = (found[name] - logprobs).abs().max().item()
        assert record("logprob", difference, layout) <= MAX_LOGPROB_DIFF, name


@dataclass(frozen=True)
class Run:
    """Log-probs of a backend, what it has published behind a step, and log-probs by that."""

    before: Tensors
    published: Tensors
    after: Tensors


def reference(model: Model, out: Path) -> Run:
    values = {"model": str(model.directory), "store": str(out), "durable": False}
    config = parse_config(TrainerConfig, {**values, "optim": {"learning_rate": 1e-3}})
    backend, rows = ReferenceBackend(config, Mesh(rank=0, world_size=1)), mixed_rows(model.rules)
    before = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    backend.forward_backward([rows], PPO)
    backend.step(normalizer=50.0, learning_rate=None)
    published: Tensors = {}
    for shard in backend.write_shards(out):
        published |= load_file(out / shard.file_name)
    return Run(before, published, backend.compute_logprobs([rows], model="policy", temperature=1.0))


def fsdp(model: Model, out: Path, ranks: Pool, layout: dict[str, Any]) -> Run:
    ranks.run("prove", 2, model=str(model.directory), out=str(out), fsdp=layout, steps=1)
    published: Tensors = {}
    for path in (out / "published").glob("*.safetensors"):
        published |= load_file(path)
    return Run(read_ranks(out, "logprobs"), published, read_ranks(out, "trained"))


def megatron(model: Model, out: Path, ranks: Pool, layout: dict[str, Any]) -> Run:
    ranks.run("vision", 2, model=str(model.directory), out=str(out), layout=layout)
    return Run(*(read_ranks(out, name) for name in ("logprobs", "weights", "trained")))


def check_run(run: Run, stored: Stored, model: Model, out: Path, layout: str) -> None:
    """What a directory says is read, and what is published is stored as it is there."""
    agree(run.before, logprobs_by(Oracle(stored.straight)), layout)
    shapes = {name: tensor.shape for name, tensor in load_file(model.directory / FILE).items()}
    assert {name: tensor.shape for name, tensor in run.published.items()} == shapes
    folder, straight = out / "reloaded", model is stored.straight
    again = stored.read_by_transformers(run.published, folder, straight=straight)
    agree(run.after, logprobs_by(again), layout)
    moved = max(float((run.after[name] - run.before[name]).abs().max()) for name in run.after)
    assert moved > 1e-3


@fast
def test_the_reference_backend(stored: Stored, model: Model, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check_run(reference(model, tmp_path / "out"), stored, model, tmp_path, "reference")


@pytest.mark.parametrize("layout", [{}, {"expert": 2}])
def test_parts_of_a_rank(
    stored: Stored, model: Model, tmp_path: Path, cut_ranks: Pool, layout: dict[str, Any]
) -> None:
    """No part of a tensor has the shape of the whole."""
    check_run(fsdp(model, tmp_path, cut_ranks, layout), stored, model, tmp_path, "fsdp")


@pytest.mark.parametrize("layout", [{"expert": 2}, {"tensor": 2, "sequence_parallel": True}])
def test_megatron(
    stored: Stored, model: Model, tmp_path: Path, pool: Pool, layout: dict[str, Any]
) -> None:
    check_run(megatron(model, tmp_path, pool, layout), stored, model, tmp_path, "megatron")


def test_qwen3_5_whose_experts_are_one_tensor(tmp_path: Path, pool: Pool) -> None:
    """As it is published; transformers writes a tensor for each."""
    model = build_model(tmp_path / "model", "qwen3_5_moe")
    named = dict(model.load().named_parameters())
    stored = {name: parameter.detach().contiguous() for name, parameter in named.items()}
    save_file(stored, model.directory / FILE, {"format": "pt"})
    (tmp_path / "out").mkdir()
    run = megatron(model, tmp_path / "out", pool, {"expert": 2})
    agree(run.before, logprobs_by(Oracle(model)), "megatron")
    assert {n: t.shape for n, t in run.published.items()} == {n: t.shape for n, t in named.items()}
    folder = shutil.copytree(model.directory, tmp_path / "reloaded")
    save_file(run.published, folder / FILE, {"format": "pt"})
    agree(run.after, logprobs_by(Oracle(Model(folder))), "megatron")


@fast
async def test_the_reference_engine(stored: Stored, model: Model, tmp_path: Path) -> None:
    """A version may be stored in another way than the model that serves."""
    other = build_model(tmp_path / "other", FAMILY, seed=1, **sizes_of(model))
    tensors = load_file(other.directory / FILE)
    oracle = stored.read_by_transformers(tensors, tmp_path / "straight", straight=False)
    if model is stored.published:
        shutil.copy(tmp_path / "straight" / FILE, other.directory / FILE)
    store = WeightStore(tmp_path / "weights", durable=False)
    version = import_checkpoint(store, other.directory, None, 0)
    engine = create_engine("reference", EngineConfig(model=str(model.directory), threads=1))
    try:
        await engine.start()
        for row, images in rows_and_images(model):
            asked = request(row, images, request_id=f"before {row.sample_id}")
            check(Oracle(stored.straight), row, "reference engine", await sample(engine, asked))
        await engine.prepare(version.version, version.digest, version.directory)
        await engine.commit(version.version, PauseMode.WAIT)
        for row, images in rows_and_images(model):
            check(oracle, row, "reference engine", await sample(engine, request(row, images)))
    finally:
        await engine.close()


async def test_a_version_that_is_a_delta(tmp_path: Path) -> None:
    """Experts alone have moved, and are served."""
    model = build_model(tmp_path / "model", FAMILY)
    values = {"model": str(model.directory), "store": str(tmp_path), "durable": False}
    values |= {"trainable": {"allow": ["*.mlp.experts.down_proj"]}}
    config = parse_config(TrainerConfig, {**values, "optim": {"learning_rate": 1e-2}})
    backend, rows = ReferenceBackend(config, Mesh(rank=0, world_size=1)), mixed_rows(model.rules)
    store = WeightStore(tmp_path / "weights", durable=False)
    shards, last = PublishedShards(keep=True, sync=False), None
    for _ in range(2):
        base = None if last is None else last.version
        staging = store.allocate(base)
        shards.begin(base)
        files = backend.write_shards(staging.directory, shards.submit)
        shards.finish(staging.version)
        companions = companion_files(model.directory)
        first, last = last, store.commit(staging, files, companions, 0, base=base)
        backend.forward_backward([rows], PPO)
        backend.step(normalizer=50.0, learning_rate=None)
    assert first is not None and last is not None and last.base == first.version
    held = HostCache(tmp_path / "host", store).take(last.version)
    oracle, before = Oracle(Model(held.directory)), Oracle(model)
    engine = create_engine("reference", EngineConfig(model=str(model.directory), threads=1))
    try:
        await engine.start()
        await engine.prepare(last.version, last.digest, held.directory)
        await engine.commit(last.version, PauseMode.WAIT)
        for row, images in rows_and_images(model):
            deltas = await sample(engine, request(row, images))
            check(oracle, row, "reference engine", deltas)
            old = before.logprobs(followed(row, deltas[0])).detach()
            assert (torch.tensor(list(deltas[0].logprobs)) - old).abs().max() > 1e-3
    finally:
        await engine.close()


def sizes_of(model: Model) -> dict[str, Any]:
    config = json.loads((model.directory / "config.json").read_bytes())
    return {"moe_intermediate_size": config["text_config"]["moe_intermediate_size"]}


def leave_out_deepstack(model: Any) -> None:
    for merger in model.model.visual.deepstack_merger_list:
        merger.linear_fc2.weight.zero_()
        merger.linear_fc2.bias.zero_()


def feed_other_layers(model: Any) -> None:
    mergers = model.model.visual.deepstack_merger_list
    mergers[0], mergers[2] = mergers[2], mergers[0]


def exchange_gate_and_up(model: Any) -> None:
    for layer in model.model.language_model.layers:
        weight = layer.mlp.experts.gate_up_proj
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def mix_experts_up(model: Any) -> None:
    for layer in model.model.language_model.layers:
        layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.flip(0))


def route_by_all(model: Any) -> None:
    for layer in model.model.language_model.layers:
        layer.mlp.gate.top_k = 3


def turn_by_time_alone(model: Any) -> None:
    model.model.language_model.rotary_emb.mrope_section = [8, 0, 0]


def turn_by_sections_in_a_row(model: Any) -> None:
    """As Qwen2.5-VL does, whose sections are not interleaved."""
    sections = model.model.language_model.rotary_emb.mrope_section

    def join(angles: torch.Tensor) -> torch.Tensor:
        parts = [part[axis] for axis, part in enumerate(angles.split(sections, dim=-1))]
        return torch.cat(parts * 2, dim=-1)

    model.model.language_model.rotary_emb.recomposition_frequencies = join


@fast
@pytest.mark.parametrize(
    "alter",
    [
        leave_out_deepstack,
        feed_other_layers,
        exchange_gate_and_up,
        mix_experts_up,
        route_by_all,
        turn_by_time_alone,
        turn_by_sections_in_a_row,
    ],
)
def test_every_rule_shows(tmp_path: Path, alter: Callable[[Any], None]) -> None:
    """The negative control: a model that breaks one is far from what backends are held to."""
    oracle = Oracle(build_model(tmp_path / "model", FAMILY))
    before = logprobs_by(oracle)
    with torch.no_grad():
        alter(oracle.model)
    after = logprobs_by(oracle)
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert moved > 500 * MAX_LOGPROB_DIFF


REAL: dict[str, Any] = {  # config.json of Qwen3-VL-30B-A3B
    "text_config": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}


@fast
def test_the_published_checkpoint_has_these_names_and_shapes() -> None:
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**REAL))
    document = {**REAL, "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    family = family_of(document)
    found = WeightMap(family, read_shape(family, document)).hf_tensors()
    expected = {name: tuple(t.shape) for name, t in exchanged(model.state_dict()).items()}
    assert found == expected
    prefix = "model.language_model.layers.47.mlp.experts."
    assert found[f"{prefix}gate_up_proj"] == (128, 2048, 1536)
    assert found[f"{prefix}down_proj"] == (128, 768, 2048)


@fast
def test_fp8_has_no_layout_for_them(tmp_path: Path) -> None:
    model = build_model(tmp_path / "model", FAMILY)
    options = ConvertOptions(to="hf", quantize="fp8", sync=False)
    with pytest.raises(InvalidCheckpointError, match="all experts in one tensor"):
        convert(model.directory, tmp_path / "fp8", options)
    write = quantizing(PublishedShards(keep=False, sync=False).submit, Fp8Blocks())
    with pytest.raises(UnquantizableWeightsError, match="all experts in one tensor"):
        write(tmp_path, "a.safetensors", load_file(model.directory / FILE))


@fast
def test_routers_that_do_not_normalise_are_refused_where_they_would_not(tmp_path: Path) -> None:
    """transformers normalises whatever config.json says."""
    model = build_model(tmp_path / "model", FAMILY, norm_topk_prob=False)
    upstream.load()  # before anything imports Megatron
    from services.trainer.backends.megatron.fit import UnsupportedFeatureError
    from services.trainer.backends.megatron.model_config import read_model

    with pytest.raises(UnsupportedFeatureError, match="norm_topk_prob is false"):
        read_model(model.directory)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_experts_and_the_tower_may_stay_as_they_are(
    backend: str, tmp_path: Path, pool: Pool, cut_ranks: Pool
) -> None:
    """Bit for bit, under the name that the checkpoint has for them all."""
    model = build_model(tmp_path / "model", FAMILY)
    settings: dict[str, Any] = {
        "model": str(model.directory),
        "out": str(tmp_path),
        "trainer": {
            "vision": {"frozen_tower": True},
            "trainable": {"deny": ["*.mlp.experts.gate_up_proj"]},
            "optim": {"learning_rate": 1e-3, "max_grad_norm": 0},
        },
    }
    if backend == "fsdp":
        cut_ranks.run("parts", 2, **settings)
    else:
        pool.run("vision_parts", 2, layout={"expert": 2}, **settings)
    before, after = load_file(model.directory / FILE), read_ranks(tmp_path, "weights")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_tower = "visual" in name and "merger" not in name
        held = is_tower or name.endswith("experts.gate_up_proj")
        assert torch.equal(after[name], tensor) == held, name
