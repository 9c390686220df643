"""Lets SGLang start on a CPU; does nothing unless SGLANG_USE_CPU_ENGINE=1.

Triton: the mock that SGLang ships for macOS, which its own installer refuses elsewhere.
torchvision: schemas of two operators, whose library is built for CUDA alone on PyPI.
Enumerations: pickled by value, as Python does since 3.11.4. Those before pickle a call of getattr,
which SGLang refuses from its encoders, so that images are waited for in vain.
LoRA: SGLang's layers for it make pinned tensors, which torch refuses without an accelerator; in
those modules alone they are made unpinned.
torch_memory_saver: what SGLang asks to free weights and cache, which is made for CUDA alone. Here
the pages of tensors that were made for either are given back to the system, and come back as zeros.
Processes: SGLang starts its own afresh, for the sake of accelerators, and each imports for seven
seconds what the first one has imported. Here they are forks of it; it has no threads by then.
"""

import contextlib
import ctypes
import enum
import importlib.machinery
import importlib.util
import mmap
import multiprocessing
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


PRUNED = 1024  # storages of one region that are remembered before those that are gone are not


class MemorySaver:
    """What `torch_memory_saver.torch_memory_saver` offers, on a CPU."""

    def __init__(self):
        self._storages = {}  # by tag

    @contextlib.contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        """Remembers the memory of tensors that are made in the block and outlive it."""
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        found = self._storages.setdefault(tag, {})
        saver = self

        class Remembering(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                saver._remember(found, tree_leaves(result))
                return result

        with Remembering():
            yield
        saver._prune(found)

    def pause(self, tag=None):
        """Gives the pages of a region back."""
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.PAGESIZE
        for name in self._storages if tag is None else [tag]:
            found = self._storages.get(name, {})
            self._prune(found)
            for storage in found.values():
                address = storage.data_ptr()
                first, end = -(-address // page) * page, (address + storage.nbytes()) // page * page
                if end > first and libc.madvise(
                    ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
                ):
                    raise OSError(ctypes.get_errno(), "madvise")

    def resume(self, tag=None):
        """Nothing: a page comes back when it is written."""

    def _remember(self, found, values):
        import torch

        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                found.setdefault(storage._cdata, storage)
        if len(found) > PRUNED:
            self._prune(found)

    @staticmethod
    def _prune(found):
        """Forgets storages that nobody else has."""
        from torch._C import _storage_Use_Count

        for key in [key for key, kept in found.items() if _storage_Use_Count(kept._cdata) <= 1]:
            del found[key]


class MemorySaverFinder:
    """An import hook for `torch_memory_saver`, where there is none."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch_memory_saver":
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.torch_memory_saver = MemorySaver()
        module.configure_subprocess = contextlib.nullcontext
        return module

    def exec_module(self, module):
        pass


def _by_value(member, protocol):
    return member.__class__, (member._value_,)


def _fork():
    """As SGLang starts its processes, which asks for `spawn` right before."""
    choose = multiprocessing.set_start_method

    def choose_fork(method, force=False):
        choose("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = choose_fork


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    if sys.version_info < (3, 11, 4):
        enum.Enum.__reduce_ex__ = _by_value
    _install_triton()
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.meta_path.insert(0, UnpinnedLora())
    sys.meta_path.append(MemorySaverFinder())
    _fork()
