"""Each implementation of an operation against the formula, and which of them is chosen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sluice import operations
from sluice.fused_operations import (
    MOST_ROWS,
    PackRows,
    attend_masked,
    attention_kernel,
    rms_norm,
    rotate,
    swiglu,
)
from sluice.operations import (
    OPERATIONS,
    OperationError,
    OperationsConfig,
    Usage,
    adamw_options,
    choose,
    chosen,
)
from sluice.platform import CPU, CUDA, NPU
from tests.fused_stand_ins import (
    CALLS,
    attend_rows,
    half_turned,
    normed,
    place_all,
    varlen_attn,
)

EPSILON = 1e-6
HOST = torch.device("cpu")
HOPPER = Usage(device_type=CUDA.device_type, dtype="bfloat16", capability=(9, 0), heads=(128, 128))
ASCEND = Usage(device_type=NPU.device_type, dtype="bfloat16", heads=(128, 128))
DENSE = ("attention", "rms_norm", "rotary", "swiglu", "adamw")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of them are installed."""
    place_all(monkeypatch)
    yield


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in {each.package for row in OPERATIONS.values() for each in row if each.package}:
        monkeypatch.setitem(sys.modules, each, None)


@pytest.mark.parametrize(
    "implementation", ["plain", "torch_rms_norm", "npu_rms_norm", "liger", "closed_form"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 512])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
@pytest.mark.usefixtures("packages")
def test_norms_are_the_formula(
    implementation: str, dtype: torch.dtype, weights: torch.dtype, size: int, scale: float
) -> None:
    torch.manual_seed(size)
    hidden = (torch.randn(5, size) * scale).to(dtype).requires_grad_()
    weight = torch.randn(size).to(weights).requires_grad_()
    found = rms_norm(implementation, hidden, weight, EPSILON)
    assert found.dtype == torch.promote_types(dtype, weights)
    wanted = normed(hidden, EPSILON) * weight.double()
    rounded = dtype.itemsize < 4 or weights.itemsize < 4
    near = {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.double(), wanted, **near)
    expected = torch.autograd.grad(wanted.sum(), (hidden, weight))
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == exact.dtype
        distance = (gradient.double() - exact.double()).norm()
        assert distance <= (5e-2 if rounded else 1e-3) * (exact.double().norm() + size)


def test_not_a_number_stays_one_and_nothing_is_nothing() -> None:
    hidden, weight = torch.tensor([[1.0, float("nan")], [3.0, 4.0]]), torch.ones(2)
    for implementation in ("plain", "torch_rms_norm", "closed_form"):
        found = rms_norm(implementation, hidden, weight, EPSILON)
        assert found[0].isnan().all() and found[1].isfinite().all()
        assert rms_norm(implementation, torch.empty(0, 2), weight, EPSILON).shape == (0, 2)


@pytest.mark.parametrize("implementation", ["plain", "npu_rotary_mul", "liger", "closed_form"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("packages")
def test_heads_are_turned_by_the_formula(implementation: str, dtype: torch.dtype) -> None:
    """Narrow heads and wide angles, too, as autocast has them."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 5, 8, dtype=dtype), torch.randn(2, 2, 5, 8, dtype=dtype)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cosine, sine = angles.cos(), angles.sin()
    found = rotate(implementation, query.clone(), key.clone(), cosine, sine)
    for heads, turned in zip((query, key), found, strict=True):
        wide = heads.double()
        wanted = wide * angles.double().cos()[:, None] + half_turned(wide) * sine.double()[:, None]
        assert turned.dtype == torch.float32
        torch.testing.assert_close(turned.double(), wanted, rtol=1e-5, atol=1e-6)
        assert (turned - heads).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_turned_heads_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """Whatever the angles of the two halves, and where one of both needs none."""
    torch.manual_seed(0)
    query = torch.randn(2, 6, 5, 8).to(dtype).requires_grad_()
    key = torch.randn(2, 2, 5, 8).to(dtype)
    angles = torch.randn(2, 5, 8)
    turned, other = rotate("closed_form", query, key, angles.cos(), angles.sin())
    assert not other.requires_grad
    wide = query.double()
    wanted = (
        wide * angles.double().cos()[:, None] + half_turned(wide) * angles.double().sin()[:, None]
    )
    coming = torch.randn(wanted.shape, dtype=torch.float64)
    (exact,) = torch.autograd.grad(wanted, query, coming)
    (found,) = torch.autograd.grad(turned, query, coming.float())
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize < 4 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, exact, **near)


def test_a_frozen_norm_passes_its_gradient_on_and_has_none() -> None:
    """As under adapters."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8)
    coming = torch.randn(3, 5, 8)
    (found,) = torch.autograd.grad(rms_norm("closed_form", hidden, weight, EPSILON), hidden, coming)
    wanted = normed(hidden, EPSILON) * weight.double()
    (exact,) = torch.autograd.grad(wanted, hidden, coming.double())
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["plain", "npu_swiglu", "liger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("packages")
def test_gates_are_the_formula(implementation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = (torch.randn(7, 24) * torch.tensor([1e-3, 1.0, 30.0]).repeat(8)).to(dtype)
    gate, up = both.chunk(2, dim=-1)  # not contiguous
    found = swiglu(implementation, gate, up)
    wide = gate.double()
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize < 4 else {"rtol": 1e-5, "atol": 1e-6}
    wanted = wide / (1 + (-wide).exp()) * up.double()
    torch.testing.assert_close(found.double(), wanted, **near)
    assert found.dtype == dtype
    assert swiglu(implementation, gate[:0], up[:0]).shape == (0, 12)


KERNELS = ["flash_attn", "flash_attn_3", "npu_fusion_attention", "torch_varlen"]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value"), [(4, 2, 16, 16), (2, 2, 24, 16)])
@pytest.mark.usefixtures("packages")
def test_packs_are_attended_row_by_row(
    implementation: str, window: int | None, heads: int, kv_heads: int, size: int, value: int
) -> None:
    """Against torch's attention of each row in float64, behind keys that have no query."""
    torch.manual_seed(0)
    queries, keys = [3, 1, 4], [3, 5, 9]
    query = torch.randn(8, heads, size)
    key, values = torch.randn(17, kv_heads, size), torch.randn(17, kv_heads, value)
    kernel = attention_kernel(implementation)
    assert kernel is not None
    rows = PackRows(queries, keys, HOST)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the kernels are given what it has made
        found = kernel(query, key, values, rows, 0.3, window)
    assert found.shape == (8, heads, value) and CALLS[implementation] == 1
    outputs, first_query, first_key = [], 0, 0
    for count, seen in zip(queries, keys, strict=True):
        q = query[first_query : first_query + count].bfloat16().double().transpose(0, 1)
        k, v = (
            part[first_key : first_key + seen].bfloat16().double().transpose(0, 1)
            for part in (key, values)
        )
        ends = torch.arange(seen - count, seen)[:, None]
        visible = torch.arange(seen) <= ends
        if window is not None:
            visible &= torch.arange(seen) > ends - window
        row = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=0.3, enable_gqa=True
        )
        outputs.append(row[0].transpose(0, 1))
        first_query, first_key = first_query + count, first_key + seen
    torch.testing.assert_close(found.double(), torch.cat(outputs), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("packages")
def test_torch_2_11_is_not_told_that_heads_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def earlier(*given: Any, return_aux: None = None, **options: Any) -> torch.Tensor:
        return varlen_attn(*given, enable_gqa=True, **options)

    torch.manual_seed(0)
    query = torch.randn(5, 4, 16, dtype=torch.bfloat16)
    key, value = torch.randn(2, 5, 2, 16, dtype=torch.bfloat16)
    kernel = attention_kernel("torch_varlen")
    assert kernel is not None
    wanted = kernel(query, key, value, PackRows([2, 3], [2, 3], HOST), 0.3, None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", earlier)
    found = kernel(query, key, value, PackRows([2, 3], [2, 3], HOST), 0.3, None)
    assert torch.equal(found, wanted) and CALLS["torch_varlen"] == 2


@pytest.mark.usefixtures("packages")
def test_more_rows_than_an_npu_takes_are_attended_in_parts() -> None:
    torch.manual_seed(0)
    lengths = [1 + index % 2 for index in range(MOST_ROWS + 10)]
    packed = torch.randn(sum(lengths), 1, 16, dtype=torch.bfloat16)
    kernel = attention_kernel("npu_fusion_attention")
    assert kernel is not None
    found = kernel(packed, packed, packed, PackRows(lengths, lengths, HOST), 0.25, None)
    assert CALLS["npu_fusion_attention"] == 2
    wanted = attend_rows(packed, packed, packed, lengths, lengths, 0.25, len(packed))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("implementation", ["torch_fused", "torch_foreach"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_makes_the_steps_of_the_formula(implementation: str, decay: float) -> None:
    torch.manual_seed(0)
    start, rate, betas, epsilon = torch.randn(33, 17), 1e-2, (0.9, 0.95), 1e-8
    parameter = torch.nn.Parameter(start.clone())
    options = adamw_options(implementation)
    assert options == {implementation.removeprefix("torch_"): True}
    adam = torch.optim.AdamW([parameter], rate, betas, epsilon, decay, **options)
    wanted, first, second = (
        start.double(),
        torch.zeros(33, 17).double(),
        torch.zeros(33, 17).double(),
    )
    for step in range(1, 6):
        parameter.grad = torch.randn(33, 17)
        gradient = parameter.grad.double()
        adam.step()
        wanted *= 1 - rate * decay
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.square()
        root = (second / (1 - betas[1] ** step)).sqrt() + epsilon
        wanted -= rate * first / (1 - betas[0] ** step) / root
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    assert (parameter - start).abs().max() > rate  # it does step


def dense(asked: OperationsConfig, usage: Usage) -> list[str]:
    found = choose(asked, usage, DENSE)
    return [found[operation] for operation in DENSE]


@pytest.mark.usefixtures("without_packages")
def test_without_packages_torch_runs() -> None:
    plain = OperationsConfig()
    host = Usage(device_type=CPU.device_type)
    closed = ["torch_sdpa", "closed_form", "closed_form", "plain", "torch_fused"]
    assert dense(plain, host) == closed
    serving = Usage(device_type=CPU.device_type, trains=False)
    assert dense(plain, serving) == ["torch_sdpa", "plain", "plain", "plain", "torch_fused"]
    assert dense(plain, HOPPER) == [
        "torch_sdpa",
        "torch_rms_norm",
        "plain",
        "plain",
        "torch_fused",
    ]
    assert dense(plain, ASCEND)[-1] == "torch_foreach"
    assert chosen("attention", CPU.device_type) == "torch_sdpa"
    assert choose(plain, ASCEND, ["experts"]) == {"experts": "loop"}
    assert choose(plain, HOPPER, ["experts"]) == {"experts": "torch_grouped_mm"}


@pytest.mark.usefixtures("packages")
def test_what_is_installed_runs_on_the_device_it_is_for() -> None:
    plain = OperationsConfig()
    assert dense(plain, HOPPER) == ["flash_attn_3", "liger", "liger", "liger", "torch_fused"]
    ampere = Usage(**{**vars(HOPPER), "capability": (8, 0)})
    assert dense(plain, ampere)[0] == "flash_attn"
    turing = Usage(**{**vars(HOPPER), "capability": (7, 5)})
    assert dense(plain, turing)[0] == "torch_sdpa"
    wide = Usage(**{**vars(HOPPER), "heads": (512, 512)})
    assert dense(plain, wide)[0] == "torch_sdpa"
    exact = Usage(**{**vars(HOPPER), "dtype": "float32"})
    assert dense(plain, exact)[0] == "torch_sdpa"
    assert dense(plain, ASCEND) == [
        "npu_fusion_attention",
        "npu_rms_norm",
        "npu_rotary_mul",
        "npu_swiglu",
        "torch_foreach",
    ]
    serving = Usage(**{**vars(ASCEND), "trains": False})
    assert dense(plain, serving)[0] == "torch_sdpa"
    host = Usage(device_type=CPU.device_type)
    closed = ["torch_sdpa", "closed_form", "closed_form", "plain", "torch_fused"]
    assert dense(plain, host) == closed
    engine = Usage(**{**vars(HOPPER), "models": "megatron", "engine_obstacle": ""})
    assert dense(plain, engine) == [*["transformer_engine"] * 3, "plain", "transformer_engine"]


@pytest.mark.usefixtures("packages")
def test_one_is_forced_or_forbidden_by_name() -> None:
    forced = OperationsConfig(attention="torch_sdpa", rms_norm="plain", adamw="torch_foreach")
    assert dense(forced, HOPPER) == ["torch_sdpa", "plain", "liger", "liger", "torch_foreach"]
    of_torch = OperationsConfig(attention="torch_varlen")
    assert dense(of_torch, HOPPER)[0] == "torch_varlen"
    bare = OperationsConfig(without=("flash_attn_3", "flash_attn"))
    assert dense(bare, HOPPER)[0] == "torch_sdpa"  # it is not taken unasked
    without = OperationsConfig(without=("flash_attn_3", "liger"))
    assert dense(without, HOPPER) == [
        "flash_attn",
        "torch_rms_norm",
        "plain",
        "plain",
        "torch_fused",
    ]


@pytest.mark.parametrize(
    ("asked", "usage", "reason"),
    [
        ({"attention": "flash_attn"}, Usage(device_type="cpu"), "it is for cuda, not cpu"),
        ({"attention": "flash_attn"}, HOPPER, "the package flash_attn is not installed"),
        ({"rms_norm": "npu_rms_norm"}, HOPPER, "it is for npu, not cuda"),
        ({"swiglu": "megatron_swiglu"}, HOPPER, "it is not for models of transformers"),
        ({"experts": "loop"}, HOPPER, "operations.experts: loop has no effect on this model"),
        ({"logprobs": "chunked"}, HOPPER, "chunked has no effect on this model; leave it out"),
    ],
)
@pytest.mark.usefixtures("without_packages")
def test_one_that_cannot_run_is_refused_with_the_reason(
    asked: dict[str, str], usage: Usage, reason: str
) -> None:
    with pytest.raises(OperationError, match=reason):
        choose(OperationsConfig(**asked), usage, DENSE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (8, 9)}, "it is for compute capability 9, not 8.9"),
        ({"dtype": "float32"}, "it computes in bfloat16 or float16, not float32"),
        ({"heads": (512, 128)}, "its heads have at most 256 numbers, not 512"),
    ],
)
@pytest.mark.usefixtures("packages")
def test_one_that_is_not_able_to_is_refused_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    usage = Usage(**{**vars(HOPPER), **change})
    with pytest.raises(OperationError, match=reason):
        choose(OperationsConfig(attention="flash_attn_3"), usage, DENSE)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"attention": "flash"}, "Input should be 'auto'"),
        ({"atention": "auto"}, "atention"),
        ({"without": ["flash"]}, "without: flash is none of"),
        ({"without": ["liger"], "rms_norm": "liger"}, "liger is set for rms_norm"),
        ({"without": ["torch_grouped_mm", "transformer_engine", "loop"]}, "nothing to do experts"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OperationsConfig(**values)


def test_settings_and_table_have_the_same_names() -> None:
    for operation, row in OPERATIONS.items():
        allowed = get_args(OperationsConfig.model_fields[operation].annotation)
        assert allowed == tuple(dict.fromkeys(["auto", *(each.name for each in row)]))
    assert set(OperationsConfig.model_fields) == {*OPERATIONS, "without"}
    assert {"flash_attn", "plain"} < operations.NAMES


class Attended(TorchFunctionMode):
    """Sees how many heads PyTorch's attention is given, of queries and of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, int]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.heads.append((args[0].shape[1], args[1].shape[1]))
            if args[0].device.type == "meta":
                return args[0]
        return function(*args, **(kwargs or {}))


def test_masks_are_given_to_devices_with_keys_of_their_own_for_each_head() -> None:
    """PyTorch's kernels for CUDA take no mask otherwise; that for a CPU does, uncopied."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    mask = torch.rand(5, 5) > 0.3
    mask.fill_diagonal_(True)
    with Attended() as host:
        found = attend_masked(query, key, value, mask, 0.3)
    wide_key, wide_value = (heads.double().repeat_interleave(3, 1) for heads in (key, value))
    scores = (query.double() @ wide_key.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ wide_value, rtol=0, atol=1e-6)
    with Attended() as device:
        attend_masked(query.to("meta"), key.to("meta"), value.to("meta"), mask.to("meta"), 0.3)
    assert (host.heads, device.heads) == ([(6, 2)], [(6, 6)])
