"""Samples as SGLang sends them: tokens, log-probabilities, routed experts, weight versions.

SGLang carries a version as `<version>:<digest>` in its `weight_version`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    Sampling,
    ServedWeights,
    Timing,
)
from services.rollout.engine.versions import Version, parse_tag
from services.rollout.errors import EngineFailedError, UnfitWeightsError
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.sample import VersionSpan
from sluice.samples.stops import StopSearch
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.shape import ConfigKeys, read_shape
from sluice.weights.rules.weight_map import family_of


def of_tokens(versions: Iterable[Version | ServedWeights], first: int) -> tuple[VersionSpan, ...]:
    """Returns spans of tokens drawn one after the other, of which the first has index `first`."""
    spans: list[VersionSpan] = []
    before: ServedWeights | None = None
    for place, each in enumerate(versions, first):
        weights = ServedWeights(*each)
        begin = spans.pop().first_token if spans and weights == before else place
        before = weights
        spans.append(VersionSpan(**weights._asdict(), first_token=begin, last_token=place))
    return tuple(spans)


def versions_of(meta: Mapping[str, Any], count: int) -> list[Version] | None:
    """Returns the version of each of `count` tokens of a finished sample, None where unknown."""
    versions: list[Version] = []
    for span in meta.get("weight_versions") or ():
        version = parse_tag(span["version"])
        if version is None or span["start"] != len(versions):
            return None
        versions += [version] * (span["end"] - span["start"])
    return versions[:count] if len(versions) >= count else None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Counts of a model; `mixtures` are the indices of its layers with experts, in order."""

    layers: int
    mixtures: tuple[int, ...]
    experts: int
    chosen: int


def read_routing(document: Mapping[str, Any]) -> Routing:
    """Reads a parsed `config.json`. Raises UnfitWeightsError for a model without experts."""
    try:
        family = family_of(document)
        shape = read_shape(family, document)
        chosen = ConfigKeys(document, family).count("num_experts_per_tok", default=0)
    except InvalidCheckpointError as error:
        raise UnfitWeightsError(f"engine.routed_experts: {error}") from error
    if not (shape.sparse_layers and chosen):
        raise UnfitWeightsError("engine.routed_experts: the model has no layers of experts")
    return Routing(
        layers=shape.layers,
        mixtures=tuple(sorted(shape.sparse_layers)),
        experts=shape.experts,
        chosen=chosen,
    )


def parse_experts(text: str, routing: Routing, tokens: int) -> np.ndarray:
    """Reads base64 of int32[tokens, layers, chosen] as int16[tokens, mixture layers, chosen].

    Rows of dense layers hold nothing and are left out. Raises EngineFailedError unless there are
    `tokens` rows, all with experts of this model.
    """
    try:
        experts = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise EngineFailedError(f"SGLang sent routed experts that are no int32: {error}") from error
    width = routing.layers * routing.chosen
    if experts.size != tokens * width:
        raise EngineFailedError(
            f"SGLang sent routed experts of {experts.size / width:g} tokens, not of {tokens}: "
            f"{experts.size} values for {routing.layers} layers with {routing.chosen} each"
        )
    table = experts.reshape(tokens, routing.layers, routing.chosen)[:, list(routing.mixtures)]
    if table.size and not 0 <= table.min() <= table.max() < routing.experts:
        raise EngineFailedError(f"SGLang sent an expert that is not among {routing.experts}")
    return np.ascontiguousarray(table, dtype=np.int16)


_LEAST_TOP_P = 2.0**-20  # keeps the likeliest token alone, as all below do: kernels divide by it
QUIET_INTERVAL = 64  # tokens between the messages of a sample that nobody follows
STOP_INTERVAL = 8  # where it has stop strings: what is drawn behind one is drawn for nothing

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@dataclass(eq=False)
class PendingSample:
    """One sample of a request. Tokens that came are kept, whatever becomes of the rest."""

    index: int
    rid: str
    follows: bool  # deltas are wanted as tokens come
    temperature: float
    arrived: float
    routing: Routing | None = None  # of a model whose experts are wanted
    search: StopSearch | None = None  # where there are stop strings
    stops: frozenset[int] = frozenset()  # tokens that end it, where SGLang minds none
    weights: ServedWeights | None = None  # that it was sent for
    sent: float = 0.0
    began: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version | ServedWeights] = field(default_factory=list)
    came: int = 0  # tokens that SGLang sent, those behind a stop too
    reported: int = 0
    has_stop: bool = False  # it is at its end: what comes is left out
    finish: FinishReason | None = None
    experts: np.ndarray | None = None

    def take(
        self, message: Mapping[str, Any], serving: Version | ServedWeights, *, is_delta: bool
    ) -> int:
        """Adds what a message of SGLang brings; returns the number of tokens that it drew.

        `is_delta`: messages carry what is new, not everything so far. Raises EngineFailedError
        for a message that contradicts those before, or what the finish reason says went wrong.
        """
        meta = message["meta_info"]
        ids, rows = message["output_ids"], meta.get("output_token_logprobs") or []
        if not is_delta:
            ids, rows = ids[self.came :], rows[self.came :]
        if len(ids) != len(rows):
            raise EngineFailedError(f"SGLang sent {len(ids)} tokens and {len(rows)} log-probs")
        if ids and not self.began:
            self.began = time.monotonic()
        self.came += len(ids)
        count = self._up_to_stop(ids)
        self.token_ids += ids[:count]
        self.logprobs += [row[0] for row in rows[:count]]
        version: Version | ServedWeights = parse_tag(meta.get("weight_version")) or serving
        if self._is_of_adapter:  # SGLang names the base's alone
            assert self.weights is not None
            version = self.weights
        self.versions += [version] * count
        reason = meta.get("finish_reason")
        if reason is not None:
            self._end(meta, reason)
        return len(ids)

    def _up_to_stop(self, token_ids: Sequence[int]) -> int:
        """How many of these belong to the sample."""
        if self.has_stop:
            return 0
        if self.search is not None or self.stops:
            for count, token_id in enumerate(token_ids, 1):
                found = self.search is not None and self.search.add(token_id)
                if found or token_id in self.stops:
                    self.has_stop = True
                    return count
        return len(token_ids)

    @property
    def _is_of_adapter(self) -> bool:
        return self.weights is not None and bool(self.weights.base_digest)

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
        if kind != "abort" and meta.get("completion_tokens") != self.came:
            drawn = meta.get("completion_tokens")
            raise EngineFailedError(f"SGLang drew {drawn}, sent {self.came}")
        exact = None if self._is_of_adapter else versions_of(meta, count)
        if exact is not None:
            self.versions[self.reported :] = exact[self.reported :]
        self.finish = _FINISH.get(str(kind), FinishReason.ABORTED)
        was_cut = self.finish is FinishReason.ABORTED
        if self.has_stop:
            self.finish = FinishReason.STOP
        if self.routing is not None:
            text = meta.get("routed_experts")
            if text is None and not was_cut:  # else SGLang may have dropped what it computed
                raise EngineFailedError("SGLang ended a sample without its routed experts")
            if text is not None:
                self.experts = self._experts_of(meta["prompt_tokens"], text, self.routing)

    def _experts_of(self, prompt_length: int, text: str, routing: Routing) -> np.ndarray:
        experts = parse_experts(text, routing, prompt_length + self.came - 1)
        return experts[: prompt_length + len(self.token_ids) - 1]

    def delta(self) -> Delta | None:
        """Returns what has come since the last one; None while that is not to be sent."""
        is_new = self.reported < len(self.token_ids) and not self.has_stop
        if self.finish is None and not (self.follows and is_new):
            return None
        first, self.reported = self.reported, len(self.token_ids)
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
        """Makes a sample ready again that ended before its first token, by a pause."""
        if self.token_ids:
            raise EngineFailedError("SGLang ended a sample without a reason")
        self.finish, self.experts, self.sent = None, None, 0.0


def stop_tokens(sampling: Sampling, unsampled: Sequence[int]) -> list[int]:
    """Tokens that end a sample, beside those of the model."""
    return [*sampling.stop_token_ids, *unsampled]


def sampling_parameters(
    generation: Generation,
    index: int,
    budget: int,
    *,
    is_seeded: bool,
    unsampled: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns SGLang's sampling parameters of one sample; `unsampled` tokens end it.

    Where it is to ignore the model's end of a sequence it minds no stop token at all (0.5.23), so
    that those are found here too.
    Stop strings are found here: its servers have no tokenizer, and one that has looks at as many
    tokens as the string is encoded in, so that it misses what is drawn in more, or was cut off.
    A server that is not deterministic refuses seeds; one that is takes 42 where none is given, so
    that all samples of a prompt would be the same (0.5.23).
    """
    sampling = generation.sampling
    stops = stop_tokens(sampling, unsampled)
    interval = STOP_INTERVAL if sampling.stop or (sampling.ignore_eos and stops) else QUIET_INTERVAL
    parameters: dict[str, Any] = {
        "max_new_tokens": budget,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": max(sampling.top_p, _LEAST_TOP_P),
        "stop_token_ids": stops,
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,  # the stop token belongs to the sample
        "stream_interval": 1 if generation.stream else interval,
    }
    if is_seeded:
        fresh = secrets.randbits(62)
        parameters["sampling_seed"] = sampling.seeds[index] if sampling.seeds else fresh
    return parameters
