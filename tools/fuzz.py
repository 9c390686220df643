"""Sends every RPC of every service what no honest caller sends; exits 1 if one takes harm.

`python -m tools.fuzz [--messages 1000] [--only TEXT] [--seed 0] [--security both] [--images]`

The services run as `sluice up` starts them, in a directory of their own. Each RPC, also those of
health, reflection and the trainer's port for its ranks, gets so many malformed messages and so
many of extreme values, without security and with TLS and a token; the OpenAI port and that of a
reward model get JSON, the metrics ports odd requests, and a loop that waits for its trainer is one
of the processes. With `--images` the model sees, and messages are spoilt that show it a picture of
the store. No answer may be INTERNAL or UNKNOWN, no process may end or stop answering, none may
grow. The last line is `fuzz: rpcs=<n> messages=<n> internal=<n> unknown=<n> died=<n> hung=<n>
rss_growth_mib=<x>`: of the process that grew most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import yaml
from google.longrunning import operations_pb2
from google.protobuf import descriptor_pool, message_factory
from google.protobuf import message as pb_message
from google.rpc import status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image

from services.rollout.process import ENGINE_SERVICE, ROLLOUT_SERVICE
from services.router.__main__ import SERVICE as ROUTER_SERVICE
from sluice.api.common.v1 import wait_service_pb2
from sluice.api.trainer.v1 import worker_service_pb2  # noqa: F401 - its descriptors
from sluice.loop.status import LOOP_ADDRESS
from sluice.ports import reserve_port
from sluice.runtime.channel import create_channel
from sluice.runtime.processes import keep_processes
from sluice.runtime.security import SecurityConfig, TlsConfig, channel_credentials
from sluice.runtime.server import OPERATIONS_SERVICE, WAIT_SERVICE
from sluice.runtime.store_checks import STORE_SERVICE
from sluice.samples.blob_store import BlobStore
from sluice.samples.images import ImageRules
from tools.fuzz_messages import MessageMaker
from tools.fuzz_openai import (
    BODIES,
    CLASSIFY,
    HttpMessage,
    extreme_messages,
    fuzz_openai,
    metrics_messages,
    random_messages,
)
from tools.fuzz_seeds import Places, Shown, seeds
from tools.make_certificates import Authority

TRAINER_SERVICE = "sluice.api.trainer.v1.TrainerService"
CONVERTER_SERVICE = "sluice.api.converter.v1.ConverterService"
EVERYWHERE = (
    WAIT_SERVICE,
    OPERATIONS_SERVICE,
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)
SERVICES = {  # what each process serves
    "converter": (CONVERTER_SERVICE,),
    "engine": (ENGINE_SERVICE, STORE_SERVICE),
    "episodes": (ROLLOUT_SERVICE, STORE_SERVICE),
    "trainer": (TRAINER_SERVICE, STORE_SERVICE),
    "ranks": ("sluice.api.trainer.v1.WorkerService",),  # the trainer's port for them
    "router": (ROUTER_SERVICE, ENGINE_SERVICE),
    "judge": (),  # a reward model
    "loop": (),
}
UPLOADED = 5  # messages of a whole batch among the seeds of UploadBatch
IN_FLIGHT = 32  # calls of a process
AT_ONCE = 3  # processes: most of the time goes to calls that wait
CALL_SECONDS = 1.0  # a call may wait for longer than that; the fuzz does not
ANSWER_SECONDS = 120.0  # a service that does not answer for so long hangs
START_SECONDS = 300.0
ESCAPED = Path("/tmp/sluice-fuzz")  # what some messages name as a path
MOST_BYTES = 6 << 30  # of addresses of each process
RSS_LIMIT_MIB = 64.0
SETTLE_SECONDS = 5.0  # before memory is looked at
WARM_MESSAGES = 30  # of each kind per RPC, before memory is first looked at
_BAD_CODES = {
    grpc.StatusCode.INTERNAL.value[0]: "internal",
    grpc.StatusCode.UNKNOWN.value[0]: "unknown",
}


T = TypeVar("T")
Send = Callable[[Sequence[bytes]], Awaitable[list[Any]]]


@dataclass
class FuzzOutcome:
    """What came of it all."""

    rpcs: set[tuple[str, ...]] = field(default_factory=set)
    messages: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    growth: float = 0.0  # MiB

    def note(self, kind: str, where: str, what: str) -> None:
        self.counts[kind] += 1
        if self.counts[f"{kind} {where}"] < 3:
            print(f"{kind}: {where}: {what}", flush=True)
        self.counts[f"{kind} {where}"] += 1

    @property
    def passed(self) -> bool:
        bad = sum(self.counts[kind] for kind in ("internal", "unknown", "died", "hung"))
        return bad == 0 and self.growth <= RSS_LIMIT_MIB

    def line(self) -> str:
        counts = " ".join(
            f"{kind}={self.counts[kind]}" for kind in ("internal", "unknown", "died", "hung")
        )
        return (
            f"fuzz: rpcs={len(self.rpcs)} messages={self.messages} {counts}"
            f" rss_growth_mib={self.growth:.0f}"
        )


@dataclass
class Stack:
    """`sluice up` with a process of every kind, small models and tight limits."""

    directory: Path
    security: SecurityConfig
    sees: bool = False
    process: subprocess.Popen[bytes] | None = None
    rank_port: int = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Stack]:
        self._prepare()
        self.process = self._start("up", self.directory / "services.yaml")
        try:
            self._wait(self.process, self.directory / "services.json", "up")
            with self._loop():
                self._limit_memory()
                yield self
        finally:
            _end(self.process)

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def places(self) -> Places:
        """With a picture in the store, where the model sees."""
        if not self.sees:
            return Places(self.directory, self.model)
        rules, file = ImageRules.from_directory(self.model), io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        image = rules.prepare(file.getvalue())
        blob = BlobStore(self.directory / "store", sync=False).put(image.png)
        shown = Shown(
            digest=blob.digest,
            size=blob.size,
            placeholder=json.loads((self.model / "config.json").read_text())["image_token_id"],
            token_count=image.token_count,
            grid_thw=image.grid_thw,
            processor=rules.digest,
        )
        return Places(self.directory, self.model, shown)

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = json.loads(
            (self.directory / "services.json").read_text()
        )
        loop: dict[str, Any] = json.loads((self._run / LOOP_ADDRESS).read_text())
        return {**entries, "loop": loop}

    @property
    def _run(self) -> Path:
        return self.directory / "run"

    @contextlib.contextmanager
    def _loop(self) -> Iterator[None]:
        """A run that waits for a trainer that never comes."""
        rows = self.directory / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "12=", "answer": "3"}) + "\n")
        run = {
            "run_dir": str(self._run),
            "trainer": "127.0.0.1:9",
            "store": str(self.directory / "store"),
            "tokenizer": str(self.model),
            "rows": {"file": str(rows)},
            "rows_per_step": 1,
            "service_timeout_seconds": 1e6,
            "security": self.security.model_dump(mode="json"),
        }
        config = self.directory / "run.yaml"
        config.write_text(yaml.safe_dump(run))
        process = self._start("sft", config)
        try:
            self._wait(process, self._run / LOOP_ADDRESS, "sft")
            yield
        finally:
            _end(process)

    def _start(self, command: str, config: Path) -> subprocess.Popen[bytes]:
        with (self.directory / f"{command}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sluice.cli", command, str(config)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def address(self, process: str) -> str:
        if process == "ranks":
            return f"127.0.0.1:{self.rank_port}"
        return str(self.entries[process]["address"])

    def processes(self) -> dict[str, psutil.Process]:
        """By name, ranks and other children apart."""
        found = {}
        for name, entry in self.entries.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(entry["pid"])
                found[name] = process
                for index, child in enumerate(process.children(recursive=True)):
                    found[f"{name} child {index}"] = child
        return found

    def _limit_memory(self) -> None:
        """So that not the machine fails; what these processes start has the limit too."""
        assert self.process is not None
        supervisor = psutil.Process(self.process.pid)
        for process in {supervisor, *self.processes().values(), *supervisor.children(True)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

    def _prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            name = "tiny_qwen3_vl" if self.sees else "tiny_qwen3"
            build = [sys.executable, "-m", f"examples.models.{name}", str(self.model)]
            subprocess.run(build, check=True, timeout=START_SECONDS, stderr=subprocess.DEVNULL)
        judge = self.directory / "judge"
        if not judge.exists():
            body = self.directory / "body"  # of text alone, whatever the policy sees
            for name, *places in (("tiny_qwen3", body), ("value_head", body, judge)):
                build = [sys.executable, "-m", f"examples.models.{name}", *map(str, places)]
                subprocess.run(build, check=True, timeout=START_SECONDS, stderr=subprocess.DEVNULL)
        with reserve_port("127.0.0.1") as held:
            self.rank_port = held.getsockname()[1]
        model = str(self.model)
        engine = {"model": model, "max_running": 8, "max_model_length": 64, "waiting_limit": 64}
        episodes = {"orphan_seconds": 1.0, "kept_rollouts": 4, "max_open_rollouts": 16}
        services: dict[str, Any] = {
            "router": {"kind": "router", "config": {"proxy": {"wait_seconds": 1.0}}},
            "converter": {"kind": "converter", "config": {"roots": [str(self.directory)]}},
            "judge": {"kind": "reward_model", "config": {"model": str(judge), "threads": 1}},
            "trainer": {
                "kind": "trainer",
                "config": {
                    "model": model,
                    "durable": False,
                    "max_batches": 4,
                    "ranks": {"listen_port": self.rank_port},
                },
            },
            "engine": {
                "kind": "rollout",
                "config": {"roles": ["engine"], "engine": engine, "openai": {}},
            },
            "episodes": {
                "kind": "rollout",
                "config": {"roles": ["episodes"], "tokenizer": model, "episodes": episodes},
            },
        }
        up = {
            "run_dir": str(self.directory),
            "services": services,
            "security": self.security.model_dump(mode="json"),
            "restarts": 1000,
        }
        (self.directory / "services.yaml").write_text(yaml.safe_dump(up))

    def _wait(self, process: subprocess.Popen[bytes], file: Path, command: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((self.directory / f"{command}.log").read_text()[-2000:])
            time.sleep(0.05)


def create_security(directory: Path) -> SecurityConfig:
    """TLS with certificates on both sides, and a token."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = Authority()
    ca = authority.write(directory / "ca.pem")
    cert, key = authority.issue(directory, "service")
    (directory / "token").write_text("sesame")
    return SecurityConfig(tls=TlsConfig(cert=cert, key=key, ca=ca), token_file=directory / "token")


@dataclass
class Fuzzer:
    """Sends to the services of one stack."""

    stack: Stack
    findings: FuzzOutcome
    messages: int
    only: str
    seed: int

    async def run(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE * IN_FLIGHT))
        places = self.stack.places
        before = {name: process.pid for name, process in self.stack.processes().items()}
        count = self.messages
        self.messages = min(WARM_MESSAGES, count)
        await self._all(places)
        self.messages = count
        sizes = await self._sizes()
        await self._all(places)
        after = await self._sizes()
        for name, pid in before.items():
            now = self.stack.processes().get(name)
            if name in SERVICES and (now is None or now.pid != pid):
                self.findings.note("died", name, f"process {pid} is gone, or another one by now")
        if await asyncio.to_thread(ESCAPED.exists):
            self.findings.note("internal", "paths", f"a message made {ESCAPED}")
        for name in sizes.keys() & after.keys():
            growth = (after[name] - sizes[name]) / 2**20
            print(f"memory: {name} {sizes[name] / 2**20:.0f} MiB, grew {growth:.1f}", flush=True)
            self.findings.growth = max(self.findings.growth, growth)

    async def _sizes(self) -> dict[str, int]:
        await asyncio.sleep(SETTLE_SECONDS)
        return {name: p.memory_info().rss for name, p in self.stack.processes().items()}

    async def _all(self, places: Places) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def fuzz(process: str) -> None:
            async with turns:
                await self._fuzz_process(process, places)

        async with asyncio.TaskGroup() as group:
            for process in SERVICES:
                group.create_task(fuzz(process))
        if self.only in "engine openai":
            await self._fuzz_json("engine openai", "openai_url", BODIES)
        if self.only in "judge classify":
            await self._fuzz_json("judge classify", "classify_url", CLASSIFY)
        for process in SERVICES:
            if process != "ranks" and self.only in f"{process} metrics":
                await self._fuzz_metrics(process)

    async def _fuzz_process(self, process: str, places: Places) -> None:
        others = () if process == "ranks" else EVERYWHERE
        async with create_channel(self.stack.address(process), self.stack.security) as channel:
            served = (*SERVICES[process], *others)
            if others and (more := await _listed(channel) - set(served)):
                raise SystemExit(f"{process} serves {more} too: name it in SERVICES")
            for service in served:
                for method in _methods(service):
                    if self.only in f"{process} {method.full_name}":
                        await self._fuzz(process, channel, method, places)

    async def _fuzz(
        self, process: str, channel: grpc.aio.Channel, method: Any, places: Places
    ) -> None:
        name = f"/{method.containing_service.full_name}/{method.name}"
        where = f"{process} {name}"
        self.findings.rpcs.add((process, name, str(self.stack.security.tls is not None)))
        dice = random.Random(f"{self.seed} {where}")
        if process == "trainer":
            await self._upload(channel, places)
        valid = seeds(name, places)
        maker = MessageMaker(dice, places.names)
        kind = message_factory.GetMessageClass(method.input_type)
        coded = [message.SerializePartialToString() for message in valid] or [b""]

        def made() -> Iterator[list[bytes]]:
            for _ in range(self.messages):
                data = maker.malformed(coded)
                yield [data]
            for _ in range(self.messages):
                data = maker.extreme(kind, valid)
                if method.client_streaming and valid:  # what comes before it opens the stream
                    yield [*coded[: dice.randrange(len(coded) + 1)], data]
                else:
                    yield [data]

        answers = message_factory.GetMessageClass(method.output_type).FromString
        codes: Counter[str] = Counter()
        began, queue = time.monotonic(), made()
        with contextlib.ExitStack() as stack:
            if method.client_streaming:
                blocking = stack.enter_context(self._blocking_channel(process))
                send = self._threaded(blocking.stream_stream(name, response_deserializer=answers))
            else:
                send = self._awaited(channel.unary_stream(name, response_deserializer=answers))

            async def sender() -> None:
                for messages in queue:
                    code = await self._send(send, where, messages)
                    codes[code.name] += 1

            await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
        self.findings.messages += codes.total()
        self.findings.codes += codes
        await self._recover(process, channel, where)
        answered = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        print(f"{where}: {time.monotonic() - began:.1f} s: {answered}", flush=True)

    def _blocking_channel(self, process: str) -> grpc.Channel:
        """For streams of requests: grpc.aio loses the status of some that are refused."""
        address, tls = self.stack.address(process), self.stack.security.tls
        if tls is None:
            return grpc.insecure_channel(address)
        return grpc.secure_channel(address, channel_credentials(tls))

    def _threaded(self, call: Any) -> Send:
        token = self.stack.security.token()
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)

        def run(messages: Sequence[bytes]) -> list[Any]:
            return list(call(iter(messages), timeout=CALL_SECONDS, metadata=metadata))

        return lambda messages: asyncio.to_thread(run, messages)

    def _awaited(self, call: Any) -> Send:
        async def run(messages: Sequence[bytes]) -> list[Any]:
            return [answer async for answer in call(messages[-1], timeout=CALL_SECONDS)]

        return run

    async def _upload(self, channel: grpc.aio.Channel, places: Places) -> None:
        """Give the trainer the batch that requests name, unless it has it."""
        method = f"/{TRAINER_SERVICE}/UploadBatch"
        messages = [each.SerializeToString() for each in seeds(method, places)][:UPLOADED]
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.stream_unary(method)(_each(messages), timeout=ANSWER_SECONDS)

    async def _send(self, send: Send, where: str, messages: Sequence[bytes]) -> grpc.StatusCode:
        """One call; what it answers is looked through for errors of the server."""
        try:
            for answer in await send(messages):
                self._look(where, answer)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            kind = _BAD_CODES.get(code.value[0])
            if kind is not None:
                self.findings.note(kind, where, f"{error.details()} for {messages[-1][:200]!r}")
            return code
        return grpc.StatusCode.OK

    def _look(self, where: str, message: pb_message.Message) -> None:
        """Errors stand in answers too: of operations, of groups, of engines."""
        if isinstance(message, status_pb2.Status):
            if (kind := _BAD_CODES.get(message.code)) is not None:
                self.findings.note(kind, where, message.message)
            return
        for item, value in message.ListFields():
            if item.message_type is None or item.message_type.GetOptions().map_entry:
                continue
            for one in value if item.is_repeated else (value,):
                self._look(where, one)

    async def _recover(self, process: str, channel: grpc.aio.Channel, where: str) -> None:
        """The service answers, and goes on where a message told it to pause or sleep."""
        if process == "ranks":
            process, channel = (
                "trainer",
                create_channel(self.stack.address("trainer"), self.stack.security),
            )
        ask = channel.unary_unary(
            f"/{WAIT_SERVICE}/ListWaits",
            request_serializer=wait_service_pb2.ListWaitsRequest.SerializeToString,
        )
        listing = channel.unary_unary(
            f"/{OPERATIONS_SERVICE}/ListOperations",
            request_serializer=operations_pb2.ListOperationsRequest.SerializeToString,
            response_deserializer=operations_pb2.ListOperationsResponse.FromString,
        )
        try:
            await ask(wait_service_pb2.ListWaitsRequest(), timeout=ANSWER_SECONDS)
            request = operations_pb2.ListOperationsRequest()
            self._look(where, await listing(request, timeout=ANSWER_SECONDS))
            if process == "engine":
                await channel.unary_unary(f"/{ENGINE_SERVICE}/Resume")(b"", timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            kind = "hung" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "died"
            self.findings.note(kind, where, f"it answers no more: {error.details()}")

    async def _fuzz_json(
        self, where: str, address: str, bodies: Mapping[str, Mapping[str, Any]]
    ) -> None:
        count = self.messages * len(bodies)
        extreme = random.Random(self.seed).choices(list(extreme_messages(bodies)), k=count)
        malformed = random_messages(self.seed, count, bodies)
        url = self.stack.entries[where.split()[0]][address]
        await self._fuzz_http(where, url, itertools.chain(extreme, malformed), bodies)

    async def _fuzz_metrics(self, process: str) -> None:
        messages = metrics_messages(self.seed, 2 * self.messages)
        url = f"http://{self.stack.entries[process]['metrics_address']}"
        await self._fuzz_http(f"{process} metrics", url, messages, ("/metrics",), formed=False)

    async def _fuzz_http(
        self,
        where: str,
        url: str,
        messages: Iterator[HttpMessage],
        paths: Iterable[str],
        *,
        formed: bool = True,
    ) -> None:
        """Send to a port of HTTP; `formed` is whether it refuses in OpenAI's form."""
        security, context = self.stack.security, None
        if security.tls is not None:
            assert security.tls.cert is not None
            context = ssl.create_default_context(cafile=security.tls.ca)
            context.load_cert_chain(security.tls.cert, security.tls.key)
        found = await fuzz_openai(
            url,
            messages,
            token=security.token() or "",
            tls=context,
            at_once=IN_FLIGHT,
            seconds=ANSWER_SECONDS,
        )
        self.findings.messages += found.messages
        for path in paths:
            self.findings.rpcs.add((where, path, str(context is not None)))
        for kind, whats in (
            ("internal", found.internal),
            ("hung", found.hung),
            ("unknown", found.formless if formed else ()),
        ):
            for what in whats:
                self.findings.note(kind, where, what[:300])
        print(f"{where}: {found.messages} messages", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _each(messages: Sequence[T]) -> AsyncIterator[T]:
    for message in messages:
        yield message


async def _listed(channel: grpc.aio.Channel) -> set[str]:
    """The services that a process says to have."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    names: set[str] = set()
    async for answer in stub.ServerReflectionInfo(_each([request]), timeout=ANSWER_SECONDS):
        names |= {service.name for service in answer.list_services_response.service}
    return names


def _methods(service: str) -> Sequence[Any]:
    found = descriptor_pool.Default().FindServiceByName(service)
    return list(found.methods)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1000, help="of each of two kinds per RPC")
    parser.add_argument("--only", default="", help="part of `PROCESS SERVICE.METHOD`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--security", choices=("none", "tls", "both"), default="both")
    parser.add_argument("--images", action="store_true", help="to a model that sees")
    parser.add_argument("--directory", type=Path, help="kept; default: a temporary one")
    flags = parser.parse_args(arguments)
    findings = FuzzOutcome()
    with contextlib.ExitStack() as stack:
        directory = flags.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-fuzz-"))
        )
        for name in ("none", "tls") if flags.security == "both" else (flags.security,):
            security = SecurityConfig()
            if name == "tls":
                security = create_security(directory / "trust")
            with Stack(directory / name, security, flags.images).running() as running:
                fuzzer = Fuzzer(running, findings, flags.messages, flags.only, flags.seed)
                asyncio.run(fuzzer.run())
    print("codes:", ", ".join(f"{code} {count}" for code, count in findings.codes.most_common()))
    print(findings.line())
    return 0 if findings.passed else 1


if __name__ == "__main__":
    keep_processes(os.getppid())  # what it started ends with it, however it ends
    sys.exit(main())
