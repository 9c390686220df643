"""Stands in for SGLang where it cannot run: several nodes, and prefill and decode apart.

`write_program` makes a file that Sluice takes for the Python with SGLang: `-m sglang.launch_server`
becomes this module, any other command that of this Python. It reads SGLang's own command line and
speaks as much of its HTTP protocol as an engine uses. Where processes belong together it is as
strict as SGLang: a node without all others never serves, and hangs when one of them dies; keys and
values of a prompt are fetched from the prefill server by room, and nothing is drawn without them.

Tokens follow from prompt, place and weights alone: `expected` computes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCABULARY = int(os.environ.get("STAND_IN_VOCABULARY", "64"))  # of the tokens drawn
FIELDS = {
    "/generate": ("rid", "input_ids", "return_logprob", "routed_dp_rank", "extra_key"),
    "/abort_request": ("rid",),
    "/pause_generation": ("mode",),
    "/continue_generation": ("torch_empty_cache",),
    "/update_weights_from_disk": ("model_path", "weight_version", "flush_cache"),
    "/weights_checker": ("action",),
}


def write_program(folder: Path) -> Path:
    """Writes what `engine.sglang.python` is to name."""
    program, package = folder / "stand-in", folder / "modules" / "sglang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    own = f'{sys.executable} "{Path(__file__)}"'
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then shift 2; exec {own} "$@"; fi\n'
        f'PYTHONPATH="{package.parent}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program


def fingerprint(model: Path) -> str:
    """Of the weights in a directory."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def token(prompt: list[int], place: int, weights: str) -> int:
    digest = hashlib.sha256(f"{prompt} {place} {weights}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY


def expected(prompt: list[int], count: int, *weights: Path) -> list[int]:
    """Tokens after a prompt: the first by the first weights, which read it, others by the last."""
    marks = [fingerprint(each) for each in weights]
    return [token(prompt, place, marks[-1] if place else marks[0]) for place in range(count)]


class Server:
    """The state of one process."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.mode = flags.get("disaggregation_mode", "null")
        self.model, self.version = Path(flags["model_path"]), flags.get("weight_version", "")
        self.weights = fingerprint(self.model)
        self.pace = float(os.environ.get("STAND_IN_SECONDS", "0"))  # of a token
        self.reading = float(os.environ.get("STAND_IN_PROMPT_SECONDS", "0"))
        self.resumed = threading.Event()
        self.resumed.set()
        self.peers: list[socket.socket] = []
        self.computing = threading.Lock()
        self.aborted: set[str] = set()
        self.rooms: dict[int, int] = {}  # the first token of what was read
        self.room_came = threading.Condition()
        self.requests = 0

    def meet(self) -> None:
        """Waits for all nodes. A node whose neighbour dies hangs, as one in a collective does."""
        count, rank = int(self.flags.get("nnodes", 1)), int(self.flags.get("node_rank", 0))
        if count == 1:
            return
        host, _, port = self.flags["dist_init_addr"].rpartition(":")
        peers = []
        if rank == 0:
            with socket.create_server((host.strip("[]"), int(port))) as meeting:
                while len(peers) < count - 1:
                    peer, _ = meeting.accept()
                    said = json.loads(peer.makefile().readline())
                    assert said["weight_version"] == self.version, "a node of another group"
                    peers.append(peer)
            for peer in peers:
                peer.sendall(b"go\n")
        else:
            peer = None
            while peer is None:
                try:
                    peer = socket.create_connection((host.strip("[]"), int(port)))
                except OSError:
                    time.sleep(0.05)
            said = {"rank": rank, "weight_version": self.version}
            peer.sendall(json.dumps(said).encode() + b"\n")
            assert peer.recv(3), "the first node has gone"
            peers.append(peer)
        if rank == 0:
            self.peers = peers
        else:
            threading.Thread(target=self._answer_collectives, args=peers, daemon=True).start()

    def _answer_collectives(self, first: socket.socket) -> None:
        while first.recv(1):
            first.sendall(b"y")

    def compute(self) -> None:
        """What all nodes do together; without one of them it never ends."""
        with self.computing:
            for peer in self.peers:
                with contextlib.suppress(OSError):
                    peer.sendall(b"x")
                    if peer.recv(1):
                        continue
                while True:
                    time.sleep(1)

    def info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "tp_size": int(self.flags.get("tp_size", 1)),
            "dp_size": 1 if "enable_dp_attention" in self.flags else self.copies,
            "attn_dp_size": self.copies if "enable_dp_attention" in self.flags else 1,
            "device": self.flags.get("device", "cpu"),
            "dtype": self.flags.get("dtype", "float32"),
            "max_req_input_len": 4090,
            "max_total_num_tokens": 65536,
            "incremental_streaming_output": True,
            "weight_version": self.version,
            "disable_radix_cache": True,
            "disaggregation_mode": self.mode,
            "seen": self.requests,
            "aborted": len(self.aborted),
            "flags": self.flags,
        }

    @property
    def copies(self) -> int:
        return int(self.flags.get("dp_size", 1))

    def checksums(self) -> dict[str, Any]:
        size = int(self.flags.get("tp_size", 1))
        ranks = [
            {
                "parallelism_info": {"dp_rank": 0, "pp_rank": 0, "tp_rank": rank},
                "checksums": {"all": self.weights[:16]},
            }
            for rank in range(size)
        ]
        return {"success": True, "ranks": ranks}

    def read_prompt(self, prompt: list[int], room: int) -> int:
        first = token(prompt, 0, self.weights)
        with self.room_came:
            self.rooms[room] = first
            self.room_came.notify_all()
        return first

    def fetch(self, host: str, port: int, room: int) -> int:
        """The first token of a room, once the prefill server has it."""
        with socket.create_connection((host, port)) as peer:
            peer.sendall(f"{room}\n".encode())
            answer = peer.makefile().readline()
        if not answer:
            raise ConnectionError("the prefill server has gone")
        return int(answer)

    def serve_rooms(self) -> None:
        port = int(self.flags["disaggregation_bootstrap_port"])
        meeting = socket.create_server((self.flags["host"], port))

        def hand_over(peer: socket.socket) -> None:
            room = int(peer.makefile().readline())
            with self.room_came:
                self.room_came.wait_for(lambda: room in self.rooms)
                peer.sendall(f"{self.rooms.pop(room)}\n".encode())
            peer.close()

        def accept() -> None:
            while True:
                peer, _ = meeting.accept()
                threading.Thread(target=hand_over, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server_version = "stand-in"
    of: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/openapi.json":
            self._answer({"paths": paths(), "components": {}})
        else:
            self._answer(self.of.info())

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        of, path = self.of, self.path
        if path == "/generate":
            self._generate(body)
        elif path == "/weights_checker":
            self._answer(of.checksums())
        else:
            if path == "/abort_request":
                of.aborted.add(body["rid"])
            elif path == "/pause_generation":
                of.resumed.clear()
            elif path == "/continue_generation":
                of.resumed.set()
            elif path == "/update_weights_from_disk":
                of.model, of.version = Path(body["model_path"]), body["weight_version"]
                of.weights = fingerprint(of.model)
            self._answer({"success": True})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _generate(self, body: dict[str, Any]) -> None:
        of = self.of
        many = isinstance(body["rid"], list) if "rid" in body else False
        requests = [
            {
                name: value[index] if isinstance(value, list) else value
                for name, value in body.items()
            }
            if many
            else body
            for index in range(len(body["rid"]) if many else 1)
        ]
        of.requests += len(requests)
        rank = body.get("routed_dp_rank")
        if rank is not None and not 0 <= rank < of.copies:
            self.send_error(400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        writing = threading.Lock()
        threads = [
            threading.Thread(target=self._one, args=(index, request, writing), daemon=True)
            for index, request in enumerate(requests)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wfile.write(b"data: [DONE]\n\n")

    def _one(self, index: int, request: dict[str, Any], writing: threading.Lock) -> None:
        of, prompt = self.of, request["input_ids"]
        count = request["sampling_params"].get("max_new_tokens", 16)
        rid = request.get("rid", "")
        first = -1
        if of.mode != "null":
            assert request.get("bootstrap_room") is not None, "a request without a room"
        if of.mode == "prefill":
            time.sleep(of.reading)
            of.read_prompt(prompt, request["bootstrap_room"])
            count = 1
        elif of.mode == "decode":
            where = request["bootstrap_host"], request["bootstrap_port"], request["bootstrap_room"]
            first = of.fetch(*where)
        for place in range(max(count, 1)):
            of.resumed.wait()
            of.compute()
            if place:
                time.sleep(of.pace)
            drawn = first if first >= 0 and not place else token(prompt, place, of.weights)
            ends = place == count - 1 or not count
            reason: dict[str, Any] | None = {"type": "length", "length": count} if ends else None
            if rid in of.aborted:
                reason = {"type": "abort", "message": "aborted"}
            meta = {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "cached_tokens": 1,
                "completion_tokens": place + 1,
                "weight_version": of.version,
                "weight_versions": [{"version": of.version, "start": 0, "end": place + 1}],
                "output_token_logprobs": [[-0.5, drawn, None]] if count else [],
                "dp_rank": request.get("routed_dp_rank"),
            }
            if "logprob_start_len" in request and of.mode != "decode":
                given = prompt[request["logprob_start_len"] :]
                meta["input_token_logprobs"] = [
                    [-float(place), each, None] for place, each in enumerate(given)
                ]
            message = {"index": index, "output_ids": [drawn] if count else [], "meta_info": meta}
            with writing:
                self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())
                self.wfile.flush()
            if reason is not None:
                return


def paths() -> dict[str, Any]:
    """Describes what is offered."""
    found = {}
    for path, names in FIELDS.items():
        schema = {"anyOf": [{"properties": {name: {} for name in names}}]}
        found[path] = {
            "post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}
        }
    return found


def parse(words: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            flags[name] = True
        else:
            flags[name] = word if flags[name] is True else [flags[name], word]
    return flags


class Listener(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


def main() -> None:
    flags = parse(sys.argv[1:])
    Handler.of = server = Server(flags)
    server.meet()
    if server.mode == "prefill" and int(flags.get("node_rank", 0)) == 0:
        server.serve_rooms()
    Listener((flags["host"], int(flags["port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
