"""Megatron-Core on a CPU: its calls of the accelerator interface are answered by the CPU.

Megatron 0.16 writes one maker's device into its code: it asks that interface of torch for the
current device, names it when it makes tensors, moves tensors there, and sorts gradients by the
names of its tensor types. None of its options changes that. So on a CPU every module of Megatron
finds, under its name `torch`, an object that is torch but for these answers. Only what Megatron
was seen to call is here.

The answers stay inside Megatron's modules on purpose: functions of torch replaced for the whole
process break others without any error (with `torch.tensor` wrapped, transformers no longer
notices its meta-device context and leaves rotary frequencies uninitialised). Three methods of
tensors and modules cannot be confined; for callers outside they do what they did.

Beside the interface there are three CPU paths that Megatron lacks: split sizes of expert-parallel
exchanges (`maybe_move_tensor_to_cpu` leaves CPU tensors alone, `all_to_all_single` wants numbers),
gathers and scatters of unequal shares (experts divided over tensor ranks; gloo only has equal
ones), and the fusion by torch.compile, which is turned off.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from sluice.platform import CUDA, PlatformError

CPU_DEVICE = torch.device("cpu")
PACKAGE = "megatron"
JIT = f"{PACKAGE}.core.jit"
FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")  # called with a literal device
TYPE_NAMES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


def install() -> None:
    """Answer the accelerator interface and load Megatron. Safe to call twice.

    Raises PlatformError where an accelerator is present: there nothing needs adapting, and
    wrong devices would go unnoticed.
    """
    if torch.accelerator.is_available():
        raise PlatformError("an accelerator is present: Megatron must not be adapted to the CPU")
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if f"{PACKAGE}.core" in sys.modules:
        raise PlatformError("Megatron was imported before it could be adapted to the CPU")
    sys.meta_path.insert(0, _Finder())
    _answer_methods()
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    vars(random)["_lazy_call"] = lambda call, **_: call()  # imported by name
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    vars(dispatcher)["maybe_move_tensor_to_cpu"] = _split_sizes


class _Finder(MetaPathFinder):
    """Gives every module of Megatron the adapted torch once its body has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader)
        return spec


class _AdaptingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__name__ == JIT:  # the first modules to ask it are imported with the package
            module.disable_jit_fuser()
        if vars(module).get("torch") is torch:
            vars(module)["torch"] = _adapted_torch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Stream:
    """A stream, and any event on it: on a CPU there is nothing to wait for."""

    device = CPU_DEVICE

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return self if event is None else event

    def synchronize(self) -> None: ...


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


class _Overlay(ModuleType):
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


@functools.cache
def _adapted_torch() -> ModuleType:
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    distributed = _Overlay(
        torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter
    )
    return _Overlay(
        torch,
        distributed=distributed,
        **{CUDA.device_type: _adapted_interface()},
        **factories,
    )


def _adapted_interface() -> ModuleType:
    stream = _Stream()

    def context(chosen: object) -> AbstractContextManager[object]:
        return nullcontext(chosen)

    rng_state: dict[str, Any] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    return _Overlay(
        CUDA.module,
        current_device=lambda: CPU_DEVICE,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=context,
        Stream=lambda *args, **kwargs: stream,
        manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),
        default_generators=_Generators(),
        random=_Overlay(CUDA.module.random, **rng_state),
        **rng_state,
    )


def _all_gather(
    parts: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """torch.distributed.all_gather, also of parts that differ in size."""
    if len({part.shape for part in parts}) == 1:
        dist.all_gather(parts, mine, group=group)
        return
    rank = dist.get_rank(group)
    for source, part in enumerate(parts):
        whole = mine.contiguous() if source == rank else torch.empty_like(part)
        dist.broadcast(whole, group_src=source, group=group)
        part.copy_(whole)


def _reduce_scatter(
    mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """torch.distributed.reduce_scatter (sum), also of parts that differ in size."""
    rank = dist.get_rank(group)
    for target, part in enumerate(parts):
        whole = part.clone(memory_format=torch.contiguous_format)
        dist.reduce(whole, group_dst=target, group=group)
        if target == rank:
            mine.copy_(whole)


def _names_accelerator(device: object) -> bool:
    return str(device).partition(":")[0] == CUDA.device_type


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_accelerator(kwargs.get("device")):
            kwargs["device"] = CPU_DEVICE
        return factory(*args, **kwargs)

    return make


def _answer_methods() -> None:
    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron sorts gradients by these names; only to it are CPU tensors accelerated."""
        found = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(found, str) and caller.partition(".")[0] == PACKAGE:
            prefix, _, name = found.rpartition(".")
            return f"{prefix}.{CUDA.device_type}.{name}" if name in TYPE_NAMES else found
        return found

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    for owner in (torch.Tensor, torch.nn.Module):
        setattr(owner, CUDA.device_type, _stay(getattr(owner, CUDA.device_type)))
    torch.Tensor.record_stream = _no_stream  # type: ignore[method-assign, assignment]


def _stay(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return self if caller.partition(".")[0] == PACKAGE else move(self, *args, **kwargs)

    return stay


def _no_stream(self: torch.Tensor, s: object) -> None:
    """No stream works on a CPU tensor."""


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """In place of token_dispatcher.maybe_move_tensor_to_cpu, for tensors that are there."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
