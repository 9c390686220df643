"""Each implementation of an operation against the plain one, and which of them is chosen."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

import pytest
import torch

from sluice import operations
from sluice.operations import OPERATIONS, adamw_options, chosen, rms_norm
from sluice.platform import CPU, CUDA, NPU

EPSILON = 1e-6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    chosen.cache_clear()
    yield
    chosen.cache_clear()


def normed(hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
    """In float64, by the formula."""
    wide = hidden.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()


def with_module(patch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """An installed package that is not there."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    patch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 512])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
def test_the_norm_is_the_formula(dtype: torch.dtype, size: int, scale: float) -> None:
    torch.manual_seed(size)
    hidden = (torch.randn(5, size) * scale).to(dtype).requires_grad_()
    found = rms_norm(hidden, EPSILON)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), normed(hidden, EPSILON), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    (expected,) = torch.autograd.grad(normed(hidden, EPSILON).sum(), hidden)
    torch.testing.assert_close(
        hidden.grad,
        expected,
        rtol=2e-2 if dtype.itemsize < 4 else 1e-3,
        atol=1e-4 / max(scale, 1e-3),
    )


def test_not_a_number_stays_one_and_nothing_is_nothing() -> None:
    hidden = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    found = rms_norm(hidden, EPSILON)
    assert found[0].isnan().all() and found[1].isfinite().all()
    assert rms_norm(torch.empty(0, 4), EPSILON).shape == (0, 4)


def test_the_kernel_of_npus_is_given_what_the_plain_norm_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor]:
        return (normed(tensor, epsilon).float() * gamma,)

    hidden = torch.randn(3, 8)
    plain = rms_norm(hidden, EPSILON)
    with_module(monkeypatch, "torch_npu", npu_rms_norm=kernel)
    monkeypatch.setattr(operations.platform, "current", lambda: NPU)
    assert chosen("rms_norm", NPU.device_type) == "npu_rms_norm"
    torch.testing.assert_close(rms_norm(hidden, EPSILON), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_optimizer_makes_the_steps_of_the_formula(decay: float) -> None:
    assert adamw_options(CPU.device_type) == {"fused": True}
    torch.manual_seed(0)
    start, rate, betas, epsilon = torch.randn(33, 17), 1e-2, (0.9, 0.95), 1e-8
    parameter = torch.nn.Parameter(start.clone())
    fused = torch.optim.AdamW(
        [parameter], rate, betas, epsilon, decay, **adamw_options(CPU.device_type)
    )
    wanted, first, second = (
        start.double(),
        torch.zeros(33, 17).double(),
        torch.zeros(33, 17).double(),
    )
    for step in range(1, 6):
        parameter.grad = torch.randn(33, 17)
        gradient = parameter.grad.double()
        fused.step()
        wanted *= 1 - rate * decay
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.square()
        root = (second / (1 - betas[1] ** step)).sqrt() + epsilon
        wanted -= rate * first / (1 - betas[0] ** step) / root
    torch.testing.assert_close(parameter.detach().double(), wanted, rtol=1e-5, atol=1e-6)
    assert (parameter - start).abs().max() > rate  # it does step


def test_what_is_chosen_follows_device_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (CPU.device_type, CUDA.device_type, NPU.device_type)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    found = {kind: {name: chosen(name, kind) for name in OPERATIONS} for kind in kinds[:2]}
    assert found == {
        kind: {
            "packed_attention": "torch_sdpa",
            "rms_norm": "torch_rms_norm",
            "adamw": "torch_fused",
        }
        for kind in kinds[:2]
    }
    assert adamw_options(NPU.device_type) == {"foreach": True}
    chosen.cache_clear()
    kernel = object()
    with_module(monkeypatch, "flash_attn", flash_attn_varlen_func=kernel)
    assert [chosen("packed_attention", kind) for kind in kinds] == [
        "torch_sdpa",
        "flash_attn",
        "torch_sdpa",
    ]
    assert operations.packed_attention(CUDA.device_type) is kernel
    assert operations.packed_attention(CPU.device_type) is None
