"""Which implementation of an operation runs: the first that device, model and packages allow.

Each is compared with the formula in tests; `sluice_trainer_operation_info`,
`sluice_rollout_operation_info` and `sluice doctor` say which run. `fused_operations` calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from sluice import platform
from sluice.config import Config
from sluice.platform import CPU, CUDA, NPU

Models = Literal["transformers", "megatron"]
BOTH: tuple[Models, ...] = ("transformers", "megatron")
TRANSFORMERS: tuple[Models, ...] = ("transformers",)
MEGATRON: tuple[Models, ...] = ("megatron",)
HALF = ("bfloat16", "float16")
AUTO = "auto"


class OperationError(ValueError):
    """An implementation was asked for that cannot run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What operations are for: a model, its activations, and the device that they are on.

    heads: sizes of a key and of a value. capability: of a CUDA device. engine_obstacle: why what
    is of Transformer Engine's layers cannot run. trains: gradients are asked for.
    """

    device_type: str
    models: Models = "transformers"
    dtype: str = "float32"
    heads: tuple[int, int] = (0, 0)
    capability: tuple[int, int] = (0, 0)
    engine_obstacle: str = "the layers are not Transformer Engine's"
    trains: bool = True


def capability_of(device_type: str) -> tuple[int, int]:
    """Returns the compute capability of the current CUDA device; zeros of others."""
    if device_type != CUDA.device_type or platform.current() is not CUDA:
        return (0, 0)
    major, _, minor = platform.current().describe()["capability"].partition(".")
    return (int(major), int(minor))


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What an implementation needs; nothing given is nothing needed.

    unasked: device types on which it runs without being asked for. generation: the one major
    compute capability that it is written for.
    """

    name: str
    models: tuple[Models, ...] = BOTH
    device_types: tuple[str, ...] = ()
    unasked: tuple[str, ...] = (CPU.device_type, CUDA.device_type, NPU.device_type)
    package: str = ""
    dtypes: tuple[str, ...] = ()
    capability: tuple[int, int] = (0, 0)
    generation: int = 0
    largest_head: int = 0
    engine_layers: bool = False
    trains_only: bool = False

    def obstacle(self, usage: Usage) -> str:
        """Returns why it cannot run; empty where it can."""
        major, minor = usage.capability
        if usage.models not in self.models:
            return f"it is not for models of {usage.models}"
        if self.device_types and usage.device_type not in self.device_types:
            return f"it is for {' and '.join(self.device_types)}, not {usage.device_type}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if self.engine_layers and usage.engine_obstacle:
            return usage.engine_obstacle
        if self.dtypes and usage.dtype not in self.dtypes:
            return f"it computes in {' or '.join(self.dtypes)}, not {usage.dtype}"
        if self.generation and major != self.generation:
            return f"it is for compute capability {self.generation}, not {major}.{minor}"
        if usage.device_type == CUDA.device_type and usage.capability < self.capability:
            least = ".".join(map(str, self.capability))
            return f"it needs compute capability {least}, not {major}.{minor}"
        if self.largest_head and max(usage.heads) > self.largest_head:
            return f"its heads have at most {self.largest_head} numbers, not {max(usage.heads)}"
        if self.trains_only and not usage.trains:
            return "it is for training"
        return ""


_CUDA, _NPU, _CPU = (CUDA.device_type,), (NPU.device_type,), (CPU.device_type,)
_LIGER = Implementation(
    name="liger", models=TRANSFORMERS, device_types=_CUDA, package="liger_kernel"
)
_ENGINE = Implementation(
    name="transformer_engine",
    models=MEGATRON,
    device_types=_CUDA,
    package="transformer_engine",
    engine_layers=True,
)
_PLAIN = Implementation(name="plain")
_CLOSED_FORM = Implementation(
    name="closed_form", models=TRANSFORMERS, device_types=_CPU, trains_only=True
)


def _npu(name: str) -> Implementation:
    return Implementation(name=name, models=TRANSFORMERS, device_types=_NPU, package="torch_npu")


OPERATIONS: Mapping[str, Sequence[Implementation]] = {
    # over packed rows of several lengths, each from its start to its own tokens
    "attention": (
        Implementation(
            name="transformer_engine",
            models=MEGATRON,
            device_types=_CUDA,
            package="transformer_engine",
            engine_layers=True,
            dtypes=HALF,
        ),
        Implementation(
            name="flash_attn_3",
            device_types=_CUDA,
            package="flash_attn_interface",
            dtypes=HALF,
            generation=9,
            largest_head=256,
        ),
        Implementation(
            name="flash_attn",
            device_types=_CUDA,
            package="flash_attn",
            dtypes=HALF,
            capability=(8, 0),
            largest_head=256,
        ),
        Implementation(
            name="npu_fusion_attention",
            device_types=_NPU,
            package="torch_npu",
            dtypes=HALF,
            largest_head=768,
            trains_only=True,
        ),
        # of PyTorch itself, the kernel of flash-attn 2
        Implementation(
            name="torch_varlen",
            device_types=_CUDA,
            unasked=(),
            package="torch.nn.attention.varlen",
            dtypes=HALF,
            capability=(8, 0),
            largest_head=256,
        ),
        Implementation(name="torch_sdpa"),
    ),
    "rms_norm": (
        _ENGINE,
        Implementation(name="npu_rms_norm", device_types=_NPU, package="torch_npu"),
        _LIGER,
        Implementation(name="torch_rms_norm", models=TRANSFORMERS, unasked=_CUDA),
        Implementation(name="torch_rms_norm", models=MEGATRON),
        _CLOSED_FORM,
        _PLAIN,
    ),
    "rotary": (_ENGINE, _npu("npu_rotary_mul"), _LIGER, _CLOSED_FORM, _PLAIN),
    "swiglu": (
        _npu("npu_swiglu"),
        _LIGER,
        # one function that torch.compile makes a kernel of, at the first pass, with a C compiler
        Implementation(name="megatron_swiglu", models=MEGATRON, unasked=()),
        _PLAIN,
    ),
    "experts": (
        _ENGINE,
        Implementation(
            name="torch_grouped_mm",
            models=TRANSFORMERS,
            device_types=_CPU + _CUDA,
            capability=(8, 0),
        ),
        Implementation(name="loop"),
    ),
    # log-probs of tokens from hidden states and the output weight
    "logprobs": (
        Implementation(name="by_size"),
        Implementation(name="chunked"),
        Implementation(name="whole"),
    ),
    "adamw": (
        Implementation(
            name="transformer_engine",
            models=MEGATRON,
            device_types=_CUDA,
            package="transformer_engine",
        ),
        Implementation(name="apex", models=MEGATRON, device_types=_CUDA, package="apex"),
        Implementation(name="torch_fused", models=TRANSFORMERS, device_types=_CPU + _CUDA),
        Implementation(name="torch_foreach"),
    ),
}
NAMES = frozenset(each.name for row in OPERATIONS.values() for each in row)
MOST_LOGITS = 1 << 26  # entries in memory at once where `by_size` chooses


class OperationsConfig(Config):
    """Which implementation each operation has; `auto` is the first of the table that can run.

    One that is named and cannot run, or has nothing to do in the model, is an error at the start.
    """

    attention: Literal[
        "auto",
        "transformer_engine",
        "flash_attn_3",
        "flash_attn",
        "npu_fusion_attention",
        "torch_varlen",
        "torch_sdpa",
    ] = "auto"
    rms_norm: Literal[
        "auto",
        "transformer_engine",
        "npu_rms_norm",
        "liger",
        "torch_rms_norm",
        "closed_form",
        "plain",
    ] = "auto"
    rotary: Literal[
        "auto", "transformer_engine", "npu_rotary_mul", "liger", "closed_form", "plain"
    ] = "auto"
    swiglu: Literal["auto", "npu_swiglu", "liger", "megatron_swiglu", "plain"] = "auto"
    experts: Literal["auto", "transformer_engine", "torch_grouped_mm", "loop"] = "auto"
    logprobs: Literal["auto", "by_size", "chunked", "whole"] = Field(
        "auto",
        description="Log-probs of tokens: `whole` makes all logits of a pass, `chunked` those of"
        " some rows at a time; `by_size` chunks what is above 2^26 logits.",
    )
    adamw: Literal["auto", "transformer_engine", "apex", "torch_fused", "torch_foreach"] = "auto"
    without: tuple[str, ...] = Field((), description="Implementations that `auto` passes over.")

    @model_validator(mode="after")
    def _check_without(self) -> Self:
        if unknown := sorted(set(self.without) - NAMES):
            raise ValueError(f"without: {', '.join(unknown)} is none of {', '.join(sorted(NAMES))}")
        for operation, row in OPERATIONS.items():
            if getattr(self, operation) in self.without:
                raise ValueError(f"without: {getattr(self, operation)} is set for {operation}")
            if {each.name for each in row} <= set(self.without):
                raise ValueError(f"without: leaves nothing to do {operation} by")
        return self


UNASKED = OperationsConfig()


def choose(asked: OperationsConfig, usage: Usage, used: Collection[str]) -> dict[str, str]:
    """Returns which implementation each of the operations `used` has.

    Raises OperationError for one that is asked for and cannot run or is not used.
    """
    chosen = {}
    for operation in OPERATIONS:
        wanted = getattr(asked, operation)
        if operation in used:
            chosen[operation] = _one(operation, wanted, asked.without, usage)
        elif wanted != AUTO:
            raise OperationError(
                f"operations.{operation}: {wanted} has no effect on this model; leave it out"
            )
    return chosen


def _one(operation: str, wanted: str, without: Collection[str], usage: Usage) -> str:
    reasons = []
    for each in OPERATIONS[operation]:
        if wanted not in (AUTO, each.name):
            continue
        if wanted == AUTO and (each.name in without or usage.device_type not in each.unasked):
            continue
        reason = each.obstacle(usage)
        if not reason:
            return each.name
        reasons.append(reason)
    raise OperationError(f"operations.{operation}: {wanted} cannot run: {reasons[-1]}")


def chosen(operation: str, device_type: str) -> str:
    """Returns what runs on such a device of a model of transformers in bfloat16, unasked."""
    usage = Usage(device_type=device_type, dtype="bfloat16", capability=capability_of(device_type))
    return _one(operation, AUTO, (), usage)


def most_logits(implementation: str) -> int:
    """Returns from how many logits on an implementation of `logprobs` makes them in chunks."""
    return {"by_size": MOST_LOGITS, "chunked": 0, "whole": 1 << 62}[implementation]


def adamw_options(implementation: str) -> dict[str, bool]:
    """Returns how torch's AdamW is to work through parameters."""
    return {"fused": True} if implementation == "torch_fused" else {"foreach": True}
