"""What runs in a model of Megatron, what of its settings is passed on, and what is refused."""

from __future__ import annotations

import ast
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import utils as core_utils
from megatron.core.extensions import transformer_engine as engine_layers
from megatron.core.packed_seq_params import PackedSeqParams
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.backend import LayoutError
from services.trainer.backends.megatron import kernels, upstream
from services.trainer.backends.megatron.attention import (
    EnginePackAttention,
    KeyRange,
    PackAttention,
    PackRuns,
)
from services.trainer.backends.megatron.batch import pack_batch
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.delta_net import GatedNorm
from services.trainer.backends.megatron.fit import UnsupportedFeatureError
from services.trainer.backends.megatron.kernels import choose_operations, core_options
from services.trainer.backends.megatron.model_config import (
    read_model,
    transformer_config,
)
from sluice.algo.layout import SequenceLayout
from sluice.operations import OperationError, OperationsConfig
from tests.fused_stand_ins import CALLS, attend_rows, place_all
from tests.megatron.models import build_checkpoint, make_rows

pytestmark = pytest.mark.fast
HOST = torch.device("cpu")
UNASKED = OperationsConfig()
OFFLOAD = {"optimizer_offload": 1.0}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """A device of a kind that is not here; nothing is made on it."""
    patch.setattr(kernels, "capability_of", lambda kind: capability)
    return torch.device("cuda", 0)


def with_engine(patch: pytest.MonkeyPatch) -> None:
    place_all(patch)
    patch.setattr(upstream, "has_transformer_engine", lambda: True)
    patch.setattr(upstream, "optimizer_name", lambda: "transformer_engine")


def test_a_clamped_gate_is_that_of_transformers_to_the_bit(tmp_path: Path) -> None:
    """Compiled, a kernel rounds otherwise, and which ranks have one hangs on what they have run."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    source = read_model(build_checkpoint("gpt_oss", tmp_path))
    core = transformer_config(source, MegatronConfig(), operations={})
    gate = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    with torch.device("meta"):
        theirs = GptOssExperts(GptOssConfig.from_pretrained(tmp_path))
    pairs = torch.stack((gate, torch.zeros_like(gate)), -1).flatten(-2)  # and what is gated, plus 1
    expected = theirs._apply_gate(pairs)
    assert torch.equal(
        core.activation_func(gate.clamp(max=core.activation_func_clamp_value)), expected
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor is 0.5",
        ),
    ],
)
def test_attention_that_transformers_has_otherwise_or_not_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = build_checkpoint("gpt_oss", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises(UnsupportedFeatureError, match=said):
        read_model(tmp_path)


REFUSED = [
    ({"overlap_grad_reduce": True}, "overlap_grad_reduce: gradients are summed .* once a step"),
    ({"tp_comm_overlap": True}, "tp_comm_overlap: .* packs differ in length"),
    ({"use_precision_aware_optimizer": True}, "use_precision_aware_optimizer: its masters"),
    ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload: optimizer_offload says"),
    ({"cpu_offloading": True}, "cpu_offloading: .*recompute"),
    ({"cp_comm_type": "p2p"}, "cp_comm_type has no effect with context 1"),
    ({"overlap_param_gather": True}, "overlap_param_gather: .*have not proven equal"),
    ({"fp8_recipe": "tensorwise"}, "fp8_recipe has no effect without fp8"),
    ({"fp8": "hybrid", "dtype": "float32"}, "fp8 needs dtype bfloat16"),
    ({"fp8": "e4m3", "layer_spec": "local"}, "layer_spec is local"),
    ({"fp8": "e5m2"}, "Input should be 'hybrid' or 'e4m3'"),
]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_settings_that_would_do_nothing_are_refused_with_the_reason(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        MegatronConfig(**values)


@pytest.mark.parametrize(
    ("layout", "asked", "kind", "reason"),
    [
        ({"fp8": "hybrid"}, {}, LayoutError, "fp8 hybrid needs a cuda device, not cpu"),
        ({"layer_spec": "transformer_engine"}, {}, LayoutError, "is not installed"),
        ({"context": 2, "cp_comm_type": "a2a"}, {}, LayoutError, "and torch_sdpa runs"),
        ({}, {"attention": "transformer_engine"}, OperationError, "it is for cuda, not cpu"),
        ({}, {"adamw": "torch_fused"}, OperationError, "Megatron takes torch_foreach"),
        (OFFLOAD, {"adamw": "apex"}, OperationError, "optimizer_offload steps by torch_foreach"),
        ({}, {"without": ("torch_foreach",)}, OperationError, "Megatron takes torch_foreach"),
        ({}, {"experts": "loop"}, OperationError, "experts: loop has no effect on this model"),
        ({}, {"swiglu": "liger"}, OperationError, "it is not for models of megatron"),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(
    qwen3: Path, layout: dict[str, Any], asked: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        choose_operations(
            read_model(qwen3), MegatronConfig(**layout), OperationsConfig(**asked), HOST
        )


@pytest.mark.parametrize(
    ("capability", "recipe", "reason"),
    [
        ((9, 0), "delayed", ""),
        ((8, 9), "tensorwise", ""),
        ((8, 0), "delayed", "needs compute capability 8.9, not 8.0"),
        ((8, 9), "blockwise", "needs compute capability 9.0, not 8.9"),
        ((9, 0), "mxfp8", "needs compute capability 10.0, not 9.0"),
    ],
)
def test_fp8_runs_where_the_device_has_it(
    qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    recipe: str,
    reason: str,
) -> None:
    with_engine(monkeypatch)
    device, source = gpu(monkeypatch, capability), read_model(qwen3)
    config = MegatronConfig(fp8="hybrid", fp8_recipe=recipe)
    if reason:
        with pytest.raises(LayoutError, match=reason):
            choose_operations(source, config, UNASKED, device)
        return
    options = core_options(choose_operations(source, config, UNASKED, device), config)
    assert (options["fp8"], options["fp8_recipe"]) == ("hybrid", recipe)
    assert options["apply_rope_fusion"] and not options["bias_activation_fusion"]
    plain = core_options(
        choose_operations(read_model(qwen3), MegatronConfig(), UNASKED, HOST), config
    )
    assert not plain["apply_rope_fusion"]


def test_fp8_wants_sizes_that_divide(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch)
    device, source = gpu(monkeypatch, (9, 0)), read_model(qwen3)
    size = source.shape.ffn // 4
    assert size % 16, "the model has no such size"
    with pytest.raises(LayoutError, match=f"intermediate_size of a tensor rank, {size}"):
        choose_operations(source, MegatronConfig(fp8="e4m3", tensor=4), UNASKED, device)


@pytest.mark.parametrize(("fp8", "multiple"), [(None, 2), ("hybrid", 32)])
def test_packs_of_fp8_divide_by_sixteen(fp8: Any, multiple: int) -> None:
    config = MegatronConfig(fp8=fp8, tensor=2)
    context: Any = SimpleNamespace(rank=0, size=1)
    for rows in ([], make_rows()[:1], make_rows()):
        batch = pack_batch(rows, config, context=context)
        assert batch.token_ids.shape[1] % multiple == 0
        assert batch.runs.starts[-1] == batch.token_ids.shape[1]


def test_transformer_engine_runs_what_it_has(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch)
    device, source = gpu(monkeypatch, (9, 0)), read_model(qwen3)
    found = choose_operations(source, MegatronConfig(), UNASKED, device)
    assert {found[name] for name in ("attention", "rms_norm", "rotary", "adamw")} == {
        "transformer_engine"
    }
    monkeypatch.setattr(core_utils, "_te_version", Version("2.18.0"))
    config = MegatronConfig(context=2, cp_comm_type="all_gather")
    chosen = choose_operations(source, config, UNASKED, device)
    assert core_options(chosen, config)["cp_comm_type"] == "all_gather"
    contiguous = MegatronConfig(context=2, cp_layout="contiguous")
    assert choose_operations(source, contiguous, UNASKED, device)["attention"] == "flash_attn_3"
    forced = OperationsConfig(attention="transformer_engine")
    with pytest.raises(OperationError, match="cp_layout contiguous is not how it cuts sequences"):
        choose_operations(source, contiguous, forced, device)
    local = choose_operations(source, MegatronConfig(layer_spec="local"), UNASKED, device)
    assert (local["attention"], local["rms_norm"]) == ("flash_attn_3", "torch_rms_norm")


@pytest.mark.parametrize(
    ("exchange", "release", "reason"),
    [
        ("p2p", "2.9.0", ""),
        ("a2a", "2.9.0", "cp_comm_type a2a over packs needs Transformer Engine 2.10.0"),
        ("a2a", "2.10.0", ""),
        ("all_gather", "2.17.1", "cp_comm_type all_gather over packs needs .* 2.18.0"),
    ],
)
def test_an_exchange_that_transformer_engine_has_not_for_packs_is_refused(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, exchange: Any, release: str, reason: str
) -> None:
    """It would say so in the first pass (context_parallel.py of those releases)."""
    with_engine(monkeypatch)
    monkeypatch.setattr(core_utils, "_te_version", Version(release))
    device, config = gpu(monkeypatch, (9, 0)), MegatronConfig(context=2, cp_comm_type=exchange)
    with pytest.raises(LayoutError, match=reason) if reason else nullcontext():
        choose_operations(read_model(qwen3), config, UNASKED, device)


def test_an_exchange_of_heads_wants_heads_that_divide(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch)
    monkeypatch.setattr(core_utils, "_te_version", Version("2.18.0"))
    device, config = gpu(monkeypatch, (9, 0)), MegatronConfig(context=4, cp_comm_type="a2a")
    source = read_model(qwen3)
    assert source.shape.kv_heads == 2
    with pytest.raises(LayoutError, match=r"2 key heads of a tensor rank .* over 4 context ranks"):
        choose_operations(source, config, UNASKED, device)


def parameters_of(method: str) -> list[str]:
    """Of Megatron's own wrapper, which is not there without Transformer Engine."""
    tree = ast.parse(Path(engine_layers.__file__).read_text())
    wrapper = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    )
    found = next(
        node for node in wrapper.body if isinstance(node, ast.FunctionDef) and node.name == method
    )
    return [argument.arg for argument in found.args.args]


class EngineStandIn:
    """Megatron's wrapper of Transformer Engine's attention, by the formula, over whole packs."""

    def __init__(self, **options: Any) -> None:
        assert set(options) <= set(parameters_of("__init__"))
        self.scale = options["softmax_scale"]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **given: Any
    ) -> torch.Tensor:
        assert mask is None and set(given) <= set(parameters_of("forward"))
        assert given["attn_mask_type"].name == "causal"
        packed: PackedSeqParams = given["packed_seq_params"]
        assert packed.qkv_format == "thd" and packed.cu_seqlens_q.dtype == torch.int32
        lengths = packed.cu_seqlens_q.diff().tolist()
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(lengths)
        made = attend_rows(query, key, value, lengths, lengths, self.scale, len(query))
        return made.flatten(1)


def test_attention_of_transformer_engine_is_given_the_pack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_layers, "TEDotProductAttention", EngineStandIn)
    config: Any = SimpleNamespace(attention_dropout=0.0, operations={"attention": "torch_sdpa"})
    torch.manual_seed(0)
    query = torch.randn(12, 1, 4, 16, dtype=torch.bfloat16)
    key, value = (torch.randn(12, 1, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    runs = tuple(KeyRange(a, b, a, b) for a, b in ((0, 3), (3, 8), (8, 12)))
    pack = PackRuns(qkv_format="sbhd", runs=runs, starts=(0, 3, 8, 12))
    options: dict[str, Any] = {
        "layer_number": 1,
        "attn_mask_type": None,
        "attention_type": "self",
        "softmax_scale": 0.3,
        "cp_comm_type": None,
        "pg_collection": None,
    }
    wanted = PackAttention(config, **options)(query, key, value, packed_seq_params=pack)
    fused = EnginePackAttention(config, **options)
    for _ in range(2):  # layers share what they are told of the pack
        found = fused(query, key, value, packed_seq_params=pack)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "implementation", ["flash_attn", "flash_attn_3", "npu_fusion_attention", "torch_varlen"]
)
def test_kernels_attend_packs_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """Values narrower than keys, as latent attention has them, too."""
    place_all(monkeypatch)
    torch.manual_seed(0)
    query = torch.randn(12, 1, 4, 24, dtype=torch.bfloat16)
    key = torch.randn(12, 1, 2, 24, dtype=torch.bfloat16)
    value = torch.randn(12, 1, 2, 16, dtype=torch.bfloat16)
    runs = tuple(KeyRange(a, b, a, b) for a, b in ((0, 3), (3, 8), (8, 12)))
    outputs = []
    for name in ("torch_sdpa", implementation):
        config: Any = SimpleNamespace(attention_dropout=0.0, operations={"attention": name})
        attention = PackAttention(config, softmax_scale=None)
        outputs.append(attention(query, key, value, packed_seq_params=PackRuns(runs=runs)))
    assert CALLS[implementation] == 1
    torch.testing.assert_close(outputs[1].float(), outputs[0].float(), rtol=2e-2, atol=2e-2)


class Written(TorchDispatchMode):
    """Counts the numbers that operations write, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(made, torch.Tensor):
            self.count += made.numel()
        return made


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_rows_cost_a_gradient_no_more_than_few(ranks: int) -> None:
    """A pack of equal length: that of a row is no tensor as long as the pack."""

    def written(rows: int) -> int:
        layout = SequenceLayout(
            kind="zigzag" if ranks > 1 else "none", lengths=(1024 // rows,) * rows, size=ranks
        )
        queries = 1024 // ranks
        shapes = ((queries, 1, 4, 8), (1024, 1, 2, 8), (1024, 1, 2, 8))
        heads = [torch.randn(shape, requires_grad=True) for shape in shapes]
        config: Any = SimpleNamespace(attention_dropout=0.0, operations={"attention": "torch_sdpa"})
        attention = PackAttention(config, softmax_scale=None)
        attended = attention(*heads, packed_seq_params=PackRuns(runs=layout.runs(ranks - 1)))
        with Written() as written:
            attended.sum().backward()
        return written.count

    assert written(128) < 1.5 * written(8)


def test_norms_of_delta_nets_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_DEVICE", "cpu")
    place_all(monkeypatch)
    monkeypatch.setattr(
        "services.trainer.backends.megatron.delta_net.copy_to_tensor_model_parallel_region",
        lambda weight: weight,
    )
    heads, gate = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    outputs = []
    for name in ("plain", "npu_rms_norm"):
        norm = GatedNorm(SimpleNamespace(operations={"rms_norm": name}), 8, 1e-6)
        outputs.append(norm(heads, gate))
    assert CALLS["npu_rms_norm"] == 1
    torch.testing.assert_close(*outputs)
