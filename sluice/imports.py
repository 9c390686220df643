"""Imports of large libraries.

torch and transformers make a million objects that stay. Looking through them for garbage, again and
again while they are made, is a sixth of the work of a start. A third is for what compiles and
shards models, which transformers imports to mark a few functions, and which nothing here uses.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

COMPILER = "torch._dynamo"
INDUCTOR = "torch._inductor"
AVAILABLE = "is_torch_distributed_available"
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"  # transformers takes a name of it
SETTINGS = f"{COMPILER}.config"  # in which torch looks where it works out shapes of what is sharded
FOLDERS = "create_import_structure_from_path"  # a function of transformers, of a folder
OBJECTS_MADE = 50_000  # and not dropped, before garbage is looked for
YOUNG_SECONDS = 60.0  # after which it is looked for among what was made since

_sharding = threading.Event()  # set: transformers may shard models in this process


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no garbage meanwhile, nor looks later through what is there once it has imported.

    What imported nothing leaves all as it is: garbage of that moment would never be collected.
    """
    was_enabled, imported = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if len(sys.modules) > imported:
                gc.freeze()
            gc.enable()


@contextmanager
def uncompiled() -> Iterator[None]:
    """For imports of transformers: leaves out what compiles and shards models, here and after.

    Dynamo is still there for who asks it for more than marks. DTensor (until `with_shards`) and
    flexible attention are for transformers as on a build of torch without them. Does nothing where
    Dynamo is imported.
    """
    with uncollected():
        if COMPILER not in sys.modules:
            import torch

            stand_in, masks = Marks(COMPILER), Marks(MASKS)
            sys.modules |= {COMPILER: stand_in, MASKS: masks}
            torch._dynamo = stand_in  # type: ignore[assignment]
            _leave_out_shards()
        yield


def _leave_out_shards() -> None:
    if "transformers.modeling_utils" in sys.modules:
        return
    with _folders_remembered():
        from transformers import utils

    for name, answer in ((AVAILABLE, _sharding.is_set), ("is_torch_flex_attn_available", _no)):
        for module in (utils, utils.import_utils):
            setattr(module, name, answer)


@contextmanager
def _folders_remembered() -> Iterator[None]:
    """transformers reads all files of its 500 models twice: it remembers 128 folders of them."""
    bounded = functools.lru_cache

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if getattr(maxsize, "__name__", "") == FOLDERS:
            return bounded(None)(maxsize)
        return bounded(maxsize, typed)

    functools.lru_cache = lru_cache  # type: ignore[assignment]
    try:
        yield
    finally:
        functools.lru_cache = bounded


@contextmanager
def unsymbolic() -> Iterator[None]:
    """For transformers to make a model without sympy, which is a sixth of a start.

    It makes layers on the meta device, where torch imports sympy to draw weights and to count: here
    nothing is drawn that a checkpoint replaces, and what rotary embeddings count is on the host.
    """
    import torch
    from torch.utils._device import _device_constructors

    _device_constructors()  # it remembers what functions there are, for all that is made later on
    draw, count = torch.nn.init.normal_, torch.arange

    def draw_real(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else draw(tensor, *given, **named)

    torch.nn.init.normal_ = draw_real
    torch.arange = functools.partial(count, device="cpu")
    try:
        yield
    finally:
        torch.nn.init.normal_, torch.arange = draw, count


@contextmanager
def uninduced() -> Iterator[None]:
    """For torch's profiler to begin without the compiler, whose Inductor it asks for a setting.

    To load that and Dynamo takes a third of a second, and 70 MiB. What is loaded already is asked.
    """
    import torch

    asked: set[str] = getattr(torch, "_lazy_modules", set())
    if INDUCTOR in sys.modules or (name := INDUCTOR.removeprefix("torch.")) not in asked:
        yield
        return
    asked.discard(name)
    try:
        yield
    finally:
        asked.add(name)


def with_shards() -> None:
    """To be called before transformers shards a model: it may have been imported without."""
    _sharding.set()
    _load_settings()
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.distributed.") or hasattr(module, "DTensor"):
            continue
        if getattr(module, AVAILABLE, None) == _sharding.is_set:
            importlib.reload(module)  # its functions, which others have, see the new names


def _load_settings() -> None:
    """Of Dynamo, without the rest of it: to be asked for one would load all, a third of a second.

    They are the ones that it has once it is loaded.
    """
    if SETTINGS in sys.modules or not isinstance(stand_in := sys.modules.get(COMPILER), Marks):
        return
    (folder,) = sys.modules["torch"].__path__
    spec = PathFinder.find_spec(SETTINGS, [f"{folder}/_dynamo"])
    if spec is None or spec.loader is None:
        return  # a torch that has them elsewhere loads all
    settings = importlib.util.module_from_spec(spec)
    sys.modules[SETTINGS] = vars(stand_in)["config"] = settings
    spec.loader.exec_module(settings)


def _no() -> bool:
    return False


class Marks(ModuleType):
    """Stands in for Dynamo where functions are marked for it; the real one replaces it when used.

    Marks made until then are lost, and the functions they were for compile like any other.
    """

    def __getattr__(self, name: str) -> Any:
        known = MARKS if self.__name__ == COMPILER else NAMES
        if name in known:
            return known[name]
        if name.startswith("__") and (name, self.__name__) != ("__path__", COMPILER):
            raise AttributeError(name)  # asked of any module, not for its use
        return getattr(_load_compiler(self.__name__), name)


def _mark(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _mark


def _nothing() -> None:
    pass


def _transform_indices() -> Any:
    return _load_compiler(MASKS).TransformGetItemToIndex()


# torch asks for the last two at each step of an optimizer and when process groups end
MARKS = {
    "disable": _mark,
    "allow_in_graph": _mark,
    "assume_constant_result": _mark,
    "graph_break": _nothing,
    "trace_rules": SimpleNamespace(clear_lru_cache=_nothing),
}
NAMES = {"TransformGetItemToIndex": _transform_indices}


def _load_compiler(name: str) -> ModuleType:
    for stand_in in (COMPILER, MASKS):
        if isinstance(sys.modules.get(stand_in), Marks):
            del sys.modules[stand_in]
            vars(sys.modules["torch"]).pop("_dynamo", None)
    with uncollected():
        return importlib.import_module(name)


def import_named(name: str) -> Any:
    """Imports what `module:attribute` names, as registries of heavy things do."""
    module, _, attribute = name.partition(":")
    with uncollected():
        return getattr(importlib.import_module(module), attribute)


def keep_loaded() -> None:
    """To be called by a process that has started: what it has now is looked through no more.

    That is a third of all work of an engine, and most of what its end costs. What a step makes
    and drops is less than OBJECTS_MADE, and is not looked through either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_MADE, *gc.get_threshold()[1:])
    with suppress(RuntimeError):  # a rank has no loop, and makes hardly any
        asyncio.get_running_loop().call_later(YOUNG_SECONDS, _collect_young)


def _collect_young() -> None:
    """What calls leave is little: a quiet process would have 20 MiB of it before it looks."""
    gc.collect(1)
    asyncio.get_running_loop().call_later(YOUNG_SECONDS, _collect_young)


def run_process(main: Callable[[], int]) -> NoReturn:
    """Run the `main` of a process, and end with its exit code.

    Threads are waited for and exit handlers run as ever. Then it ends at once: to take torch and
    transformers apart is a tenth of all that importing them costs.
    """
    returned: list[int] = []

    def leave() -> None:
        if not returned:
            return  # an exception, which Python reports
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(returned[0])

    atexit.register(leave)  # before all others, so that it is called last
    returned.append(main())
    sys.exit(returned[0])
