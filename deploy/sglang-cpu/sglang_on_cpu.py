"""Lets SGLang start on a CPU; does nothing unless SGLANG_USE_CPU_ENGINE=1.

Triton: the mock that SGLang ships for macOS, which its own installer refuses elsewhere.
torchvision: schemas of two operators, whose library is built for CUDA alone on PyPI.
Enumerations: pickled by value, as Python does since 3.11.4. Those before pickle a call of getattr,
which SGLang refuses from its encoders, so that images are waited for in vain.
LoRA: SGLang's layers for it make pinned tensors, which torch refuses without an accelerator; in
those modules alone they are made unpinned.
"""

import enum
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path


def _find_stubs():
    found = importlib.util.find_spec("sglang")
    places = (found and found.submodule_search_locations) or ()
    return next((p for place in places if (p := Path(place, "_platform_stubs.py")).is_file()), None)


def _install_triton():
    stubs_path = _find_stubs()
    if importlib.util.find_spec("triton") is not None or stubs_path is None:
        return
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", stubs_path)
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)

    class Loader:
        def create_module(self, spec):
            return sys.modules.get(spec.name)

        def exec_module(self, module):
            pass

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] != "triton":
                return None
            module = sys.modules.get(name) or stubs._make_mock(name)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).setdefault(child, module)
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)

    sys.meta_path.append(Finder())
    _fill_triton(stubs)


def _fill_triton(stubs):
    """What SGLang and torch look at in Triton without running a kernel."""

    def module(name, **members):
        made = stubs._make_mock(name)
        vars(made).update(members)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)

    def plain(name, *bases):
        return type(name, bases, {})

    class Constant:
        def __init__(self, value=None):
            self.value = value

    module(
        "triton",
        __version__="3.0.0",
        cdiv=stubs._cdiv,
        next_power_of_2=stubs._next_power_of_2,
        Config=stubs._Config,
    )
    module("triton.language", constexpr=Constant)
    module("triton.runtime")
    module(
        "triton.runtime.jit",
        JITFunction=plain("JITFunction"),
        KernelInterface=plain("KernelInterface", stubs._StubBase),
    )
    module("triton.runtime.cache", triton_key=stubs._triton_key)
    module(
        "triton.runtime.autotuner",
        OutOfResources=plain("OutOfResources", Exception),
        PTXASError=plain("PTXASError", Exception),
    )
    module("triton.compiler", CompiledKernel=plain("CompiledKernel", stubs._StubBase))
    module(
        "triton.compiler.compiler",
        ASTSource=plain("ASTSource", stubs._StubBase),
        triton_key=stubs._triton_key,
    )
    module("triton.backends")
    module("triton.backends.compiler", GPUTarget=plain("GPUTarget", stubs._StubBase))


class TorchvisionOperators:
    """An import hook that runs before torchvision is looked for, once."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


PINNING = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
LORA = "sglang.srt.lora."


class UnpinnedTorch(types.ModuleType):
    """torch as a module of SGLang's sees it, but that nothing it makes is pinned."""

    def __init__(self, torch):
        super().__init__("torch")
        self._torch = torch
        for name in PINNING:
            setattr(self, name, self._unpinned(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(self._torch, name)

    @staticmethod
    def _unpinned(make):
        def call(*arguments, pin_memory=False, **named):
            return make(*arguments, **named)

        return call


class UnpinnedLora:
    """An import hook for the modules of LoRA."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(LORA):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            torch = vars(module).get("torch")
            if isinstance(torch, types.ModuleType):
                torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
                module.torch = UnpinnedTorch(torch)

        spec.loader.exec_module = exec_module
        return spec


def _by_value(member, protocol):
    return member.__class__, (member._value_,)


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    if sys.version_info < (3, 11, 4):
        enum.Enum.__reduce_ex__ = _by_value
    _install_triton()
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.meta_path.insert(0, UnpinnedLora())
