"""Lets SGLang start on a CPU; does nothing unless SGLANG_USE_CPU_ENGINE=1.

Triton: the mock that SGLang ships for macOS, which its own installer refuses elsewhere.
torchvision: schemas of two operators, whose library is built for CUDA alone on PyPI.
Enumerations: pickled by value, as Python does since 3.11.4. Those before pickle a call of getattr,
which SGLang refuses from its encoders, so that images are waited for in vain.
"""

import enum
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

STUBS = Path(__file__).parent / "sglang" / "_platform_stubs.py"


def _install_triton():
    if importlib.util.find_spec("triton") is not None or not STUBS.is_file():
        return
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", STUBS)
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


def _by_value(member, protocol):
    return member.__class__, (member._value_,)


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    if sys.version_info < (3, 11, 4):
        enum.Enum.__reduce_ex__ = _by_value
    _install_triton()
    sys.meta_path.insert(0, TorchvisionOperators())
