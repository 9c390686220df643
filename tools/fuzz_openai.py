"""Sends an OpenAI port what no client should send: numbers at their ends, broken JSON, odd paths.

Messages are written to the socket as they are, since clients mend much of it on the way. What a
port may answer is 2xx, or 4xx with an error object in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SECONDS = 120.0  # for one answer: only a hang takes so long
ERROR_FIELDS = {"message", "type", "param", "code"}
CHAT = {"messages": [{"role": "user", "content": "12"}], "max_tokens": 2}
COMPLETION = {"prompt": "12=", "max_tokens": 2}
RECORD = {"sluice_record": {"group": "fuzz", "session": "s"}}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/tokenize": {"prompt": "12"},
    "/detokenize": {"tokens": [1, 2]},
    "/sluice/v1/groups/fuzz/rewards": {"rewards": {"s": 1.0}},
    "/sluice/v1/groups/fuzz/close": {},
}
FIELDS = (
    *("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "echo", "tools", "tool_choice", "chat_template_kwargs", "sluice_record"),
    *("return_token_ids", "logit_bias", "user", "response_format", "tokens", "rewards"),
    *("messages.0.role", "messages.0.content", "messages.0.tool_calls", "messages.0.name"),
    *("sluice_record.group", "sluice_record.session", "rewards.s", "prompt.0", "tokens.0"),
    *("stop.0", "stop_token_ids.0", "stream_options.include_usage", "no_such_field"),
    *("text", "text.0"),
)
CLASSIFY: Mapping[str, Mapping[str, Any]] = {  # of a reward model called `judge`
    "/classify": {"model": "judge", "text": ["12=3", "1="]},
}
# Of what JSON's writer has no form for, the text that takes the place of a mark.
RAW = {
    "<deep list>": "[" * 100_000 + "]" * 100_000,
    "<deep object>": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "<long integer>": "1" + "0" * 5000,
    "<large float>": "1e999",
    "<lone surrogate>": '"\\ud800"',
}
CALLS = [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    for text in ('{"a": "\\ud800"}', "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, "NaN", "{")
]
VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2, 21, 129, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 5e-324, 1e-320, 1e-30, 1e30, 1.7e308, -1.7e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "1", "true", "\0", "a\0b", "\r\n\x1b[31mred", "../../etc/passwd", "%00"),
    *("x" * 5000, "\U0010ffff", "\udfff", "a\ud800b"),
    *([], {}, [[]], [None], [True], [-1], [1.5], [2**40], [1] * 5000, ["x"] * 100, ["", "x"]),
    *([{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "\ud800"}]),
    *([{"role": "user", "content": "\ud800"}], [{"role": "assistant", "tool_calls": [{}]}]),
    *([call] for call in CALLS),
    *([{"role": "assistant", "tool_calls": [call]}] for call in CALLS),
    *({"a": {"b": [1, {"c": None}]}}, {"group": "..", "session": "."}, {"": ""}, {"\ud800": 1}),
    *RAW,
)
NAMES = (
    *(
        b"..",
        b"%2e%2e",
        b"..%2f..%2fetc%2fpasswd",
        b"%00",
        b"a%00b",
        b"%ff",
        b"%",
        b"%zz",
        b"%0d%0a",
    ),
    *(b"x" * 5000, b"\xff\xfe", b"%ed%a0%80", b"a/b", b"%2f", b"", b"%20", b"%1b[31m", b"\x7f"),
)
PATHS = (
    *(b"/v1/models/%s", b"/sluice/v1/groups/%s", b"/sluice/v1/groups/%s/rewards"),
    *(b"/sluice/v1/groups/%s/close", b"/v1/%s", b"/%s", b"/v1/models?x=%s"),
)
METHODS = (b"GET", b"POST", b"DELETE", b"PUT", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE", b"NO-SUCH")
HEADERS = (
    (b"Content-Encoding", b"gzip"),
    (b"Content-Encoding", b"deflate"),
    (b"Content-Encoding", b"no-such"),
    (b"Content-Type", b"text/plain; charset=no-such"),
    (b"Expect", b"200-ok"),
    (b"X-Sluice-Record", b"a"),
    (b"X-Sluice-Record", b"../../a/b"),
    (b"X-Sluice-Record", b"\xff/\xff"),
    (b"X-Sluice-Record", b""),
    (b"X-Sluice-Record", b"x" * 5000),
    (b"Authorization", b"\xff"),
    (b"X-Long", b"x" * 100_000),
    (b"Host", b"\x01"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Content-Length", b"-1"),
    (b"Upgrade", b"websocket"),
)


@dataclass(frozen=True)
class HttpMessage:
    """A request as its bytes go over the line; the length of the body is put in."""

    method: bytes
    target: bytes
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def is_http(self) -> bool:
        """Whether whoever reads it knows where it ends."""
        is_plain = all(0x20 < byte < 0x7F for byte in self.target)
        return is_plain and self.method != b"NO-SUCH" and not self.headers

    def encode(self, token: str) -> bytes:
        own = {name.lower() for name, _ in self.headers}
        usual = [(b"Host", b"localhost"), (b"Content-Type", b"application/json")]
        if not own & {b"transfer-encoding", b"content-length"}:
            usual.append((b"Content-Length", str(len(self.body)).encode()))
        if token:
            usual.append((b"Authorization", b"Bearer " + token.encode()))
        pairs = [pair for pair in usual if pair[0].lower() not in own]
        lines = [b"%b: %b\r\n" % pair for pair in (*pairs, *self.headers)]
        start = b"%b %b HTTP/1.1\r\n" % (self.method, self.target)
        return start + b"".join(lines) + b"Connection: close\r\n\r\n" + self.body

    def __str__(self) -> str:
        shown = [part[:120] for part in (self.method, self.target, self.body)]
        return f"{shown} {[(name, value[:40]) for name, value in self.headers]}"


@dataclass
class Findings:
    """What a port did that it must not do, a line each."""

    messages: int = 0
    internal: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    formless: list[str] = field(default_factory=list)  # refusals that no client of OpenAI reads


def extreme_messages(
    bodies: Mapping[str, Mapping[str, Any]] = BODIES,
) -> Iterator[HttpMessage]:
    """Well-formed HTTP with one thing at its end: each field with each value, each odd path."""
    for path, valid in bodies.items():
        for name in FIELDS:
            if name.partition(".")[0] in valid or name in ("no_such_field", "model"):
                for value in VALUES:
                    yield _post(path, _changed(valid, name, value))
    for method in (b"GET", b"POST", b"DELETE"):
        for pattern in PATHS:
            for odd in NAMES:
                yield HttpMessage(method, pattern % odd, b"{}")


def random_messages(
    seed: int, count: int, bodies: Mapping[str, Mapping[str, Any]] = BODIES
) -> Iterator[HttpMessage]:
    """Several fields of any value, bytes that were flipped, cut or doubled, odd headers."""
    rng = random.Random(seed)
    for _ in range(count):
        path, body = rng.choice(list(bodies.items()))
        if "/chat/" in path or path == "/v1/completions":
            body = {**body, **(RECORD if rng.random() < 0.2 else {})}
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            body = _changed(body, rng.choice(FIELDS), rng.choice(VALUES))
        message = _post(path, body)
        kind = rng.random()
        if kind < 0.25:
            message = HttpMessage(b"POST", message.target, _damaged(rng, message.body))
        elif kind < 0.35:
            data = rng.randbytes(rng.choice((1, 10, 1000)))
            message = HttpMessage(b"POST", message.target, data)
        elif kind < 0.45:
            target = rng.choice(PATHS) % rng.choice(NAMES)
            message = HttpMessage(rng.choice(METHODS), target, message.body)
        elif kind < 0.6:
            headers = (rng.choice(HEADERS),)
            message = HttpMessage(b"POST", message.target, message.body, headers)
        yield message


def metrics_messages(seed: int, count: int) -> Iterator[HttpMessage]:
    """What a port that serves `/metrics` alone gets: odd methods, paths, headers, and no body."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice((b"/metrics", b"/metrics?name[]=%s", b"/metrics?%s", b"/%s"))
        target = path % rng.choice(NAMES) if b"%s" in path else path
        headers = (rng.choice(HEADERS),) if rng.random() < 0.3 else ()
        yield HttpMessage(rng.choice(METHODS), target, b"", headers)


async def fuzz_openai(
    url: str,
    messages: Iterator[HttpMessage],
    *,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    at_once: int = 4,
    seconds: float = SECONDS,
) -> Findings:
    """Sends the messages to the port at `url` and returns what it did wrong.

    Raises OSError where nobody listens, after a message that ended the process, say.
    """
    findings = Findings()

    async def send_some() -> None:
        for message in messages:  # shared by all
            findings.messages += 1
            try:
                async with asyncio.timeout(seconds):
                    status, body = await _exchange(url, message.encode(token), tls)
            except TimeoutError:
                findings.hung.append(str(message))
                continue
            if not status and not message.is_http:
                continue  # the port may close without reading on
            if not 200 <= status < 500:
                findings.internal.append(f"{status} {message}")
            elif status >= 400 and message.method != b"HEAD" and not _has_form(body):
                findings.formless.append(f"{status} {body[:200]!r} {message}")

    await asyncio.gather(*(send_some() for _ in range(at_once)))
    return findings


async def _exchange(url: str, data: bytes, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    """Returns the status and the body of the answer; 0 where there was none."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        writer.write(data)
        answer = await reader.read(-1)
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(_chunks(body))
    words = head.split(b" ", 2)
    return (int(words[1]) if len(words) == 3 else 0), body


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def _has_form(body: bytes) -> bool:
    try:
        found = json.loads(body)
    except ValueError:
        return False
    error = found.get("error") if isinstance(found, dict) else None
    return isinstance(error, dict) and error.keys() == ERROR_FIELDS and bool(error["message"])


def _post(path: str, body: Mapping[str, Any]) -> HttpMessage:
    text = json.dumps(body)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return HttpMessage(b"POST", path.encode(), text.encode())


def _changed(body: Any, name: str, value: Any) -> Any:
    """A copy with another value at a dotted name, if there is such a place."""
    key, _, rest = name.partition(".")
    if isinstance(body, list) and key.isdecimal():
        index = int(key)
        return [_put(old, rest, value) if i == index else old for i, old in enumerate(body)]
    if isinstance(body, Mapping):
        return {**body, key: _put(body.get(key), rest, value)}
    return body


def _put(old: Any, rest: str, value: Any) -> Any:
    return _changed(old, rest, value) if rest else value


def _damaged(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    kind = rng.randrange(3)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + rng.randbytes(1) + data[place + 1 :]
    return data[:place] + data[rng.randrange(len(data) + 1) :]
