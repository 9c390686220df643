"""Samples on their way through SGLang: what is asked for one, and what has come of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.backends.sglang.experts import Routing, parse_experts
from services.rollout.backends.sglang.spans import Version, of_tokens, parse_tag, versions_of
from services.rollout.engine import Delta, FinishReason, Generation, Timing
from services.rollout.errors import EngineFailedError
from sluice.runtime.errors import InvalidFieldError

QUIET_INTERVAL = 64  # tokens between the messages of a sample that nobody follows

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@dataclass(eq=False)
class Sample:
    """One sample of a request. Tokens that came are kept, whatever becomes of the rest."""

    index: int
    rid: str
    follows: bool  # deltas are wanted as tokens come
    temperature: float
    arrived: float
    routing: Routing | None = None  # of a model whose experts are wanted
    sent: float = 0.0
    began: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    told: int = 0
    finish: FinishReason | None = None
    experts: np.ndarray | None = None

    def take(self, message: Mapping[str, Any], serving: Version, *, is_delta: bool) -> int:
        """Add what a message of SGLang brings; the number of new tokens.

        `is_delta`: messages carry what is new, not everything so far. Raises EngineFailedError
        for a message that contradicts those before, or what the finish reason says went wrong.
        """
        meta = message["meta_info"]
        ids, rows = message["output_ids"], meta.get("output_token_logprobs") or []
        if not is_delta:
            ids, rows = ids[len(self.token_ids) :], rows[len(self.token_ids) :]
        if len(ids) != len(rows):
            raise EngineFailedError(f"SGLang sent {len(ids)} tokens and {len(rows)} log-probs")
        if ids and not self.began:
            self.began = time.monotonic()
        self.token_ids += ids
        self.logprobs += [row[0] for row in rows]
        version = parse_tag(meta.get("weight_version")) or serving
        self.versions += [version] * len(ids)
        reason = meta.get("finish_reason")
        if reason is not None:
            self._end(meta, reason)
        return len(ids)

    def _end(self, meta: Mapping[str, Any], reason: Mapping[str, Any]) -> None:
        kind, status = reason.get("type"), reason.get("status_code")
        if kind == "abort" and status:
            message = str(reason.get("message"))
            raise (
                InvalidFieldError("request", message)
                if int(status) < 500
                else (EngineFailedError(f"SGLang gave up: {message}"))
            )
        count = len(self.token_ids)
        if kind != "abort" and meta.get("completion_tokens") != count:
            raise EngineFailedError(f"SGLang drew {meta.get('completion_tokens')}, sent {count}")
        exact = versions_of(meta, count)
        if exact is not None:
            self.versions[self.told :] = exact[self.told :]
        self.finish = _FINISH.get(str(kind), FinishReason.ABORTED)
        if self.routing is not None:
            self.experts = self._experts_of(meta, self.routing)

    def _experts_of(self, meta: Mapping[str, Any], routing: Routing) -> np.ndarray | None:
        text = meta.get("routed_experts")
        if text is None:
            if self.finish is FinishReason.ABORTED:  # SGLang may have dropped what it computed
                return None
            raise EngineFailedError("SGLang ended a sample without its routed experts")
        return parse_experts(text, routing, meta["prompt_tokens"] + len(self.token_ids) - 1)

    def delta(self) -> Delta | None:
        """What has come since the last one; None while that is not to be told."""
        if self.finish is None and not (self.follows and self.told < len(self.token_ids)):
            return None
        first, self.told = self.told, len(self.token_ids)
        logprobs = tuple(self.logprobs[first:])
        return Delta(
            index=self.index,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=logprobs,
            logprobs_t1=logprobs if self.temperature in (0.0, 1.0) else (),
            spans=of_tokens(self.versions[first:], first),
            finish_reason=self.finish,
            timing=self._timing() if self.finish else None,
            routed_experts=self.experts,
        )

    def _timing(self) -> Timing:
        now = time.monotonic()
        sent = self.sent or now
        began = self.began or now
        return Timing(queue=sent - self.arrived, prefill=began - sent, decode=now - began)

    def restart(self) -> None:
        """It ended before its first token, for no reason of its own."""
        if self.token_ids:
            raise EngineFailedError("SGLang ended a sample without a reason")
        self.finish, self.experts, self.sent = None, None, 0.0


def sampling_parameters(
    generation: Generation, index: int, budget: int, *, is_seeded: bool
) -> dict[str, Any]:
    """SGLang's, of one sample.

    A server that is not deterministic refuses seeds; one that is takes 42 where none is given, so
    that all samples of a prompt would be the same (0.5.23).
    """
    sampling = generation.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": budget,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "no_stop_trim": True,  # the stop token belongs to the sample
        "stream_interval": 1 if generation.stream else QUIET_INTERVAL,
    }
    if is_seeded:
        fresh = secrets.randbits(62)
        parameters["sampling_seed"] = sampling.seeds[index] if sampling.seeds else fresh
    return parameters
