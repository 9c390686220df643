"""What the processes import, and that garbage is collected again once they have."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.imports import import_named, uncollected
from tests.patience import PATIENCE

MODELS = {"transformers", "megatron", "torch._dynamo", "torch.distributed.tensor", "sympy"}
SAVING = {"torch.distributed.checkpoint", "torch.distributed.fsdp"}
TORCH = {"torch", "safetensors.torch"}
# Each line is a process, or the part of one that is imported later.
WITHOUT_TORCH = (
    "services.router.__main__",
    "services.trainer.__main__",
    "services.trainer.rank.__main__",  # tells the controller that it is there first
    "services.rollout.__main__",
    "services.rollout.episodes.worker",
    "services.rollout.openai.server",
    "services.rollout.reward_model.__main__",
    "services.rollout.engine.sglang.engine",
    "services.rollout.environments.worker",
    "services.rollout.environments.graders.remote",
    "services.converter.__main__",
    "services.gateway.__main__",
    "sluice.samples.tokenizer",
    "sluice.cli",  # with the loop and `sluice up`
    "sluice.convert_command",
    "examples.demo",
)
WITHOUT_MODELS = (
    "services.trainer.rank.executor",
    "sluice.weights.convert.conversion",
    "sluice.weights.convert.verify",
    "sluice.weights.transfer.group",
    "sluice.algo.losses",
    "sluice.algo.advantages",
)
# What compiles and shards models: transformers brings it, and who runs one has no use for it.
COMPILER = {
    "torch._dynamo.convert_frame",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
    "sympy",
}
WATCHER = """
import importlib, sys
forbidden, modules = (words.split(",") for words in sys.argv[1:])
seen = set()
for module in modules:
    importlib.import_module(module)
    found = {name for name in forbidden if name in sys.modules} - seen
    seen |= found
    if found:
        print(module, *sorted(found))
"""


def importers(modules: tuple[str, ...], forbidden: set[str]) -> dict[str, set[str]]:
    """Which of `modules`, imported one after the other, is the first to bring what in."""
    command = [sys.executable, "-c", WATCHER, ",".join(sorted(forbidden)), ",".join(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {module: set(found) for module, *found in lines}


def test_what_computes_nothing_imports_no_torch() -> None:
    heavy = TORCH | MODELS | {"matplotlib", "reasoning_gym", "math_verify", "huggingface_hub"}
    assert importers(WITHOUT_TORCH, heavy) == {}


def test_what_runs_no_model_imports_no_library_of_models() -> None:
    assert importers(WITHOUT_MODELS, MODELS | SAVING) == {}


def test_what_trains_and_serves_one_imports_no_compiler_until_it_compiles(tmp_path: Path) -> None:
    forbidden = COMPILER | {"megatron", "torch.distributed.checkpoint"}
    command = [sys.executable, "-m", "tests.unit.lean_models", str(tmp_path), *forbidden, *TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    lean, compiling = (set(line.split()) for line in done.stdout.splitlines())
    assert lean == TORCH
    assert compiling - TORCH == COMPILER


COUNTING = """
import torch
from sluice.imports import unsymbolic
with unsymbolic(), torch.device("meta"):
    assert not torch.arange(3).is_meta and torch.zeros(3).is_meta
with torch.device("meta"):
    assert torch.arange(3).is_meta
"""


def test_what_is_made_behind_a_model_counts_on_its_device_again() -> None:
    """torch remembers its functions when a device is first set for some lines."""
    subprocess.run([sys.executable, "-c", COUNTING], timeout=PATIENCE, check=True)


WORKER = """
import asyncio, sys
from services.rollout.config import GraderPoolConfig
from services.rollout.environments.runner import Environments
from services.rollout.episodes.worker import RolloutServicer
from sluice.api.rollout.v1 import rollout_service_pb2 as pb

async def ask(servicer, **flags):
    found = await servicer.ListEnvironments(pb.ListEnvironmentsRequest(**flags), None)
    schemas = {bool(each.settings_schema) for each in found.environments}
    print(found.vocabulary, len(found.environments), *schemas, "aiohttp" in sys.modules)

async def main():
    environments = Environments({}, GraderPoolConfig(), None)
    servicer = RolloutServicer(None, environments, "words")
    await ask(servicer, omits_schemas=True)
    await ask(servicer)
    await environments.close()

asyncio.run(main())
"""


def test_a_worker_that_is_asked_for_its_vocabulary_imports_no_environment_for_it() -> None:
    """Every run asks at its start; the packages behind environments take the worker's time."""
    command = [sys.executable, "-c", WORKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.splitlines() == ["words 4 False False", "words 4 True True"]


MODEL = """
import services.trainer.backends.reference.model
from functools import lru_cache
from transformers.utils.import_utils import create_import_structure_from_path as read
assert read.cache_info().misses == read.cache_info().currsize > 128, read.cache_info()
assert lru_cache(len).cache_info().maxsize == 128
from transformers.distributed import sharding_utils, utils
assert not hasattr(sharding_utils, "DTensor") and not utils.is_torch_distributed_available()
from sluice.imports import with_shards
with_shards()
from torch.distributed.tensor import DTensor
assert sharding_utils.DTensor is DTensor and utils.is_torch_distributed_available()

import sys
import torch
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
ones = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
assert torch.equal((ones @ ones).full_tensor(), torch.full((2, 2), 2.0))
assert "torch._dynamo.convert_frame" not in sys.modules
settings = sys.modules["torch._dynamo.config"]
assert torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(())) == 3
assert torch._dynamo.config is torch._dynamo.convert_frame.config is settings
"""


def test_transformers_reads_each_folder_once_and_shards_without_a_compiler_when_asked_to() -> None:
    subprocess.run([sys.executable, "-c", MODEL], timeout=PATIENCE, check=True)


def test_transformers_alone_is_seen_to_import_all_that() -> None:
    module = "transformers.modeling_utils"
    found = importers((module,), TORCH | MODELS | COMPILER)[module]
    assert found == TORCH | COMPILER | MODELS - {"megatron"}


def test_garbage_is_collected_again_after_imports_and_not_looked_for_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_this_test.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    gc.collect()
    with uncollected():
        imported = [object(), importlib.import_module("module_of_this_test")]
    assert not any(each is imported for each in gc.get_objects())
    frozen, later = gc.get_freeze_count(), [object()]
    import_named("module_of_this_test:__name__")  # it is there: what came since may be garbage
    assert gc.get_freeze_count() <= frozen
    assert any(each is later for each in gc.get_objects())
    with pytest.raises(ModuleNotFoundError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        import_named("no_such_package.module:name")
    assert gc.isenabled()


QUIET = """
import asyncio, sys, weakref
from sluice import imports

class Call:
    pass

async def main():
    imports.YOUNG_SECONDS = 0.01
    imports.keep_loaded()
    for _ in range(3):  # again and again
        call = Call()
        call.itself, gone = call, asyncio.Event()
        weakref.finalize(call, gone.set)
        del call
        async with asyncio.timeout(float(sys.argv[1])):
            await gone.wait()

asyncio.run(main())
"""


def test_a_quiet_process_looks_for_garbage_too() -> None:
    """It makes too little of it for Python to look by itself."""
    command = [sys.executable, "-c", QUIET, str(PATIENCE)]
    done = subprocess.run(command, capture_output=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("first", "given", "threads"),
    [
        ("import services", {}, 1),
        ("import services", {"OPENBLAS_NUM_THREADS": "3"}, 3),
        ("pass", {"OMP_NUM_THREADS": "2"}, 2),  # what else it goes by
    ],
)
def test_services_start_no_threads_of_numpy_unless_they_are_asked_for(
    first: str, given: dict[str, str], threads: int
) -> None:
    """Each would spin for a tenth of a second, and there would be one a core."""
    others = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    code = f"{first}\nimport os, numpy\nprint(len(os.listdir('/proc/self/task')))"
    command = [sys.executable, "-c", code]
    environment = {**others, **given}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert int(done.stdout) == min(threads, len(os.sched_getaffinity(0)))


STARTS = """
import asyncio, grpc, uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

async def main():
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(3):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            process = await asyncio.create_subprocess_exec("true")
            assert not await process.wait()
    await server.stop(0)

uvloop.run(main())
"""
HANDLERS = "fork_posix.cc"  # where gRPC's handlers say that they ran, or could not


@pytest.mark.parametrize("first", ["import services", "import sluice.supervise"])
def test_processes_are_started_without_handlers_of_grpc(first: str) -> None:
    """Now and then one waits for ever in the new process, and what started it waits for that."""
    others = {key: value for key, value in os.environ.items() if "FORK_SUPPORT" not in key}
    command = [sys.executable, "-c", f"{first}\n{STARTS}"]
    environment = others | {"GRPC_VERBOSITY": "INFO"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert HANDLERS not in done.stderr


CALLS_NOBODY = """
import sluice, grpc
with grpc.insecure_channel("127.0.0.1:9") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=60)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
"""


@pytest.mark.parametrize(("asked", "speaks"), [({}, False), ({"GRPC_VERBOSITY": "INFO"}, True)])
def test_grpc_says_no_more_than_errors_unless_asked(asked: dict[str, str], speaks: bool) -> None:
    """Lines of its own about connections stood among those of a run."""
    others = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    environment = others | {"GRPC_TRACE": "connectivity_state"} | asked
    done = subprocess.run(
        [sys.executable, "-c", CALLS_NOBODY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert bool(done.stderr) == speaks, done.stderr
