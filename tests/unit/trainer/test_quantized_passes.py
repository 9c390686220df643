"""Passes that compute with what experts are published as, and what of that nothing else sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from services.trainer.backend import LayoutError, Mesh
from services.trainer.backends.quantized_passes import (
    QuantizationAwareError,
    attach,
    check_inputs,
    simulate_experts,
)
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import OptimConfig, TrainerConfig
from services.trainer.rank.quantization import quantizing
from sluice.config import ConfigError, parse_config
from sluice.weights.convert.quantization import restored
from sluice.weights.convert.quantized_layout import Int4Groups
from sluice.weights.manifest import ShardFile
from tests.contract.training_backend.cases import (
    PPO,
    SIZES,
    Model,
    build_model,
    published,
    ragged_rows,
    relative_distance,
)
from tests.fsdp.jobs import OPTIM
from tests.models.families import CASES, build
from tests.models.simulated import SimulatedOracle, stands_for

GROUPS = Int4Groups(32)
AWARE = {"quantization": "int4_32", "quantization_aware": True}
NORMALIZER = 37.0
NAME = "model.layers.0.mlp.experts.0.up_proj.weight"


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = {"hidden_size": 64}
    return build_model(tmp_path_factory.mktemp("model"), request.param, **sizes)


def start(model: Model, path: Path, **settings: Any) -> ReferenceBackend:
    values = {"model": str(model.directory), "store": str(path), "optim": OPTIM, **settings}
    config = parse_config(TrainerConfig, values)
    return ReferenceBackend(config, Mesh(rank=0, world_size=1))


def aware(model: Model, path: Path) -> ReferenceBackend:
    return start(model, path, publish=AWARE)


def oracle_of(model: Model) -> SimulatedOracle:
    return SimulatedOracle(model, GROUPS.size, OptimConfig(**OPTIM))  # type: ignore[arg-type]


def score(backend: ReferenceBackend, model: Any = "policy") -> dict[str, torch.Tensor]:
    return backend.compute_logprobs([ragged_rows()], model=model, temperature=1.0)


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_log_probs_are_of_what_is_stored_and_the_reference_s_of_the_model(
    model: Model, tmp_path: Path
) -> None:
    backend, oracle = aware(model, tmp_path), oracle_of(model)
    wanted = {row.sample_id: oracle.logprobs(row).detach() for row in ragged_rows()}
    assert furthest(score(backend), wanted) < 1e-5
    plain = score(start(model, tmp_path))
    assert furthest(score(backend), plain) > 0.1
    assert furthest(score(backend, "reference"), plain) == 0
    named = backend.compute_top_logprobs([ragged_rows()], model="policy", temperature=1.0, count=2)
    assert furthest({name: each.logprobs for name, each in named.items()}, wanted) < 1e-5


def test_gradients_are_those_with_respect_to_what_is_stored(model: Model, tmp_path: Path) -> None:
    rows = ragged_rows()
    backend, oracle = aware(model, tmp_path), oracle_of(model)
    backend.forward_backward([rows[:5], rows[5:]], PPO)
    oracle.ppo_loss(rows).backward()
    for name, parameter in oracle.model.named_parameters():
        found = backend._optimizer.parameters[name].grad
        assert found is not None and parameter.grad is not None
        assert relative_distance(found, parameter.grad) < 1e-4, name


def test_a_checkpoint_is_that_of_a_plain_trainer_and_steps_go_on_from_it(
    model: Model, tmp_path: Path
) -> None:
    backend, oracle, rows = aware(model, tmp_path), oracle_of(model), ragged_rows()
    (checkpoint := tmp_path / "checkpoint").mkdir()

    def step(backend: ReferenceBackend) -> float:
        backend.forward_backward([rows], PPO)
        return backend.step(normalizer=NORMALIZER, learning_rate=None).grad_norm

    for _ in range(2):
        wanted = oracle.step(oracle.ppo_loss(rows), NORMALIZER)
        assert step(backend) == pytest.approx(wanted, rel=1e-4)
    backend.save_checkpoint(checkpoint)
    norms = [step(backend) for _ in range(2)]
    after = published(backend, tmp_path / "after")
    again = aware(model, tmp_path)
    step(again)
    again.load_checkpoint(checkpoint)
    assert [step(again) for _ in range(2)] == norms
    resumed = published(again, tmp_path / "resumed")
    assert all(torch.equal(resumed[name], weight) for name, weight in after.items())

    plain = start(model, tmp_path)
    plain.load_checkpoint(checkpoint)
    weights = published(plain, tmp_path / "plain")
    for name, weight in oracle.plain.named_parameters():
        found = plain._optimizer.parameters[name]
        torch.testing.assert_close(found, weight, atol=1e-4, rtol=0)
    assert weights.keys() == load_file(model.directory / "model.safetensors").keys()


def test_nothing_is_left_of_a_pass_nor_of_one_that_failed(model: Model, tmp_path: Path) -> None:
    backend = aware(model, tmp_path)
    module = backend._policy.model
    names = {name for name, _ in module.named_parameters()}
    before = published(backend, tmp_path / "before")
    seen: list[torch.Tensor] = []

    def fail(experts: Any, *_: Any) -> None:
        seen.append(experts.down_proj)
        raise RuntimeError("of the test")

    experts = [each for each in module.modules() if "down_proj" in each._parameters]
    hook = experts[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of the test"):
        score(backend)
    hook.remove()
    wanted = stands_for(experts[-1]._parameters["down_proj"], GROUPS.size)
    torch.testing.assert_close(seen[0].double(), wanted, atol=0, rtol=1e-6)
    for _ in range(2):
        for each in module.modules():
            assert not vars(each).keys() & each._parameters.keys()
        score(backend)
    assert {name for name, _ in module.named_parameters()} == names
    after = published(backend, tmp_path / "after")
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_what_is_published_is_rounded_first_where_passes_have_weights_rounded() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    stored: dict[str, torch.Tensor] = {}

    def write(directory: Path, file_name: str, made: Any, left: Any):
        stored.update(made)
        return lambda: ShardFile(file_name, 0, "", {})

    numbers = []
    for through in (None, torch.bfloat16):
        quantizing(write, GROUPS, through)(Path(), "f", {NAME: weight}, {})()
        ((_, found),) = restored(stored, GROUPS, torch.float32)
        numbers.append(found.double())
    expected = [stands_for(each, GROUPS.size) for each in (weight, weight.bfloat16().float())]
    for found, wanted in zip(numbers, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=0, rtol=1e-6)
    assert not torch.equal(*numbers)


def test_a_model_without_experts_is_refused() -> None:
    plain = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(QuantizationAwareError, match=r"no routed experts.*leave it out"):
        simulate_experts(plain, GROUPS)


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("gpt_oss", {}, "no routed experts that are stored one by one"),
        ("qwen3_moe", {"moe_intermediate_size": 48}, "48 inputs of .*down_proj, .* groups of 32"),
    ],
)
def test_experts_that_are_not_published_so_are_refused(
    name: str, settings: dict, what: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    case = replace(case, settings={**case.settings, **settings})
    module = build(case, tmp_path / "model").load()
    with pytest.raises(QuantizationAwareError, match=what):
        simulate_experts(module, GROUPS)


def test_experts_in_another_order_than_checkpoints_have_them_are_refused(
    tmp_path: Path,
) -> None:
    module: Any = build_model(tmp_path / "model", "qwen3_moe").load()
    for each in module.modules():
        if "down_proj" in each._parameters:
            each.is_transposed = True
    with pytest.raises(QuantizationAwareError, match="not what checkpoints store of experts"):
        simulate_experts(module, GROUPS)


def test_groups_that_would_go_over_ranks_are_refused() -> None:
    check_inputs("down_proj", 64, GROUPS, "fsdp.tensor")
    with pytest.raises(QuantizationAwareError, match=r"48 inputs of down_proj.*lower fsdp\.tensor"):
        check_inputs("down_proj", 48, GROUPS, "fsdp.tensor")


class Layer(torch.nn.Module):
    """As layers of Transformer Engine: weights by their names, of the layer or of the table."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.randn(4, 32))
        self.weight1 = torch.nn.Parameter(torch.randn(4, 32))
        self.by_name, self.fuse_wgrad_accumulation = by_name, False

    def _get_weight_tensors(self) -> list[Any]:
        names = ("weight0", "weight1")
        return [getattr(self, n) if self.by_name else self._parameters[n] for n in names]


def test_a_layer_that_does_not_read_what_is_put_there_is_refused() -> None:
    from services.trainer.backends.megatron import upstream

    upstream.load()
    from services.trainer.backends.megatron.quantized_passes import check_reads

    def attached(layer: Layer, names: list[str]) -> None:
        check_reads(layer, attach(layer, names, GROUPS, lambda weight: weight))
        assert not vars(layer).keys() & layer._parameters.keys()

    every = ["weight0", "weight1"]
    attached(Layer(by_name=True), every)
    for layer, names in ((Layer(by_name=False), every), (Layer(by_name=True), every[:1])):
        with pytest.raises(LayoutError, match=r"layer_spec to local"):
            attached(layer, names)
    fused = Layer(by_name=True)
    fused.fuse_wgrad_accumulation = True
    with pytest.raises(LayoutError, match="has fuse_wgrad_accumulation"):
        attached(fused, every)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"publish": {"quantization_aware": True}}, "set one of them"),
        ({"publish": {**AWARE, "quantization": "fp8"}}, "with quantization 'fp8'"),
        ({"lora": {"rank": 2}}, "no effect with lora"),
        ({"head": "value"}, "no effect with head value"),
        ({"backend": "megatron", "megatron": {"fp8": "e4m3"}}, r"not for megatron\.fp8"),
        (
            {"backend": "megatron", "megatron": {"model_provider": "a:b"}},
            r"not for megatron\.model_provider",
        ),
        (
            {"backend": "fsdp", "fsdp": {"dtype": "float32"}, "publish_dtype": "bfloat16"},
            "rounded to publish_dtype bfloat16",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({NAME: torch.ones(32, 32)}, tmp_path / "model.safetensors")
    values = {"model": str(tmp_path), "store": str(tmp_path), "publish": AWARE, **settings}
    with pytest.raises(ConfigError, match=what):
        parse_config(TrainerConfig, values)


def test_what_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({NAME: torch.ones(32, 32)}, tmp_path / "model.safetensors")
    values = {"model": str(tmp_path), "store": str(tmp_path), "publish": AWARE}
    for settings in (
        {"publish_dtype": "bfloat16"},
        {"backend": "fsdp", "publish_dtype": "bfloat16"},
        {"backend": "megatron"},
    ):
        config = parse_config(TrainerConfig, {**values, **settings})
        assert config.publish.simulated == GROUPS
        assert config.shaping["publish.quantization_aware"] == "true"
    plain = parse_config(TrainerConfig, {**values, "publish": {"quantization": "int4_32"}})
    assert plain.publish.simulated is None
