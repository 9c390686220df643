"""The interface of engine backends: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from services.rollout.errors import (
    MediaUnsupportedError,
    NoSleepError,
    NoTopTokensError,
    PromptTooLongError,
)
from sluice.imports import import_named
from sluice.profiler import ProfileOptions
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.sample import TEMPERATURES, VersionSpan, is_temperature
from sluice.samples.stops import LONGEST_STOP

if TYPE_CHECKING:
    from services.rollout.engine.config import EngineConfig
    from sluice.weights.manifest import Manifest, ShardFile
    from sluice.weights.transfer.plan import Bucket, Membership

ENGINES = {  # nothing heavy is imported until chosen
    "reference": "services.rollout.engine.reference.engine:ReferenceEngine",
    "sglang": "services.rollout.engine.sglang.engine:SglangEngine",
}


def waiting_text(waiting: int, count: int, limit: int) -> str:
    """Why a request of `count` samples is refused where `waiting` wait, of at most `limit`."""
    if count > limit:
        return f"{count} samples in one request are more than engine.waiting_limit, {limit}"
    return f"{waiting} samples wait already, and {count} more exceed engine.waiting_limit, {limit}"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class PauseMode(StrEnum):
    """WAIT lets running requests end, ABORT ends them with what they have, IN_PLACE holds them."""

    WAIT = "wait"
    ABORT = "abort"
    IN_PLACE = "in_place"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `top_k` 0 and `top_p` 1 turn them off; temperature 0 is greedy.

    The model's own end-of-sequence tokens stop a sample too, unless `ignore_eos`; the stop token is
    part of it. So does a token that completes one of the texts of `stop`: that of special tokens
    counts.
    Top-p cuts what top-k left. A seed and a position in the sequence (prompt included) fix a
    draw, so that a sample cut off and continued by token ids draws as if never cut.
    Of the first `min_new_tokens` none is drawn that would stop the sample, before top-k and top-p
    cut the rest, and no text of `stop` ends it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()  # one per sample; empty draws fresh ones
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False


MIN_TOKENS = "must be 0 to max_new_tokens"
TEXT_ONLY = "the model that serves reads text only"


class MediaKind(StrEnum):
    IMAGE = "image"


@dataclass(frozen=True)
class Media:
    """A file that a prompt shows, at the placeholder token of its place."""

    kind: MediaKind
    digest: str
    data: memoryview


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One request: `sample_count` continuations of one prompt, whose KV cache they share.

    With `stream` deltas come with every step; without, one delta per sample when it ends.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    sample_count: int = 1
    dp_rank: int = 0
    stream: bool = False
    media: tuple[Media, ...] = ()
    version: int | None = None  # of weights that the engine holds; None: those that serve
    processor: str = ""  # digest of the rules by which these were prepared; empty: unknown
    sampled_count: int = 0  # last tokens of the prompt: a stop string may have begun in them


class Timing(NamedTuple):
    """Seconds of one sample in the engine; they add up to all of its time there."""

    queue: float  # until its prompt was taken up
    prefill: float  # until its first token
    decode: float


class Numbers(Sequence[Any]):
    """A sequence that is one array: to whom reads it as Python numbers, a tuple of them."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        """`array` has one dimension and is not changed any more."""
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: Any) -> Any:
        found = self.array[place]
        return Numbers(found) if isinstance(place, slice) else found.item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self.array, dtype)
        return found.copy() if copy and found is self.array else found


def as_array(values: Sequence[Any], dtype: type[np.generic]) -> np.ndarray:
    """`np.asarray`, which takes longer to ask Numbers for theirs."""
    return np.asarray(values.array if isinstance(values, Numbers) else values, dtype)


class Delta(NamedTuple):
    """Tokens added to sample `index` of a request; `finish_reason` only on its last one.

    `logprobs` are of the tempered distribution before truncation by top-k and top-p (of
    temperature 1 when greedy), `logprobs_t1` the same at temperature 1, or
    nothing where the engine measures one of them alone. Spans count from the
    start of the response. `timing` comes with `finish_reason`, where the engine knows; so does
    `routed_experts`, where configured: int16[prompt + sampled - 1, mixture layers, chosen], of
    every token that the model took in.
    """

    index: int  # type: ignore[assignment]  # for nobody asks a delta where in it a value is
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    logprobs_t1: Sequence[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None = None
    timing: Timing | None = None
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Log-probabilities (temperature 1) of given tokens, and the likeliest tokens in their places.

    `top` has one entry a place, (token, log-probability) from the likeliest on, or is empty.
    """

    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    running_count: int
    waiting_count: int
    used_tokens: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class IncomingWeights:
    """A version that comes over transfer groups.

    `buckets` are those of each sender, in the order of the groups; `manifest` names all that the
    model must end up with. `mode` is for an engine that pauses in order to receive.
    """

    manifest: Manifest
    buckets: Sequence[Sequence[Bucket]]
    seconds: float
    mode: PauseMode = PauseMode.IN_PLACE


class ServedWeights(NamedTuple):
    """What samples tokens: a version, and of an adapter the digest of the base that it is on."""

    version: int
    digest: str
    base_digest: str = ""


@dataclass(frozen=True, kw_only=True)
class ProfileOrder:
    """A number of passes to record. The names of files in `directory` begin with `prefix`."""

    name: str
    directory: Path
    prefix: str
    pass_count: int
    options: ProfileOptions


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """A profile that was asked for: passes that are to come until it is written, then `files`.

    `failure` says why it has ended early or without them; then nothing is left.
    """

    name: str
    directory: Path
    left_count: int
    files: tuple[str, ...] = ()  # sorted
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """`version` is None before the first weights; `failure` says why an engine serves no more.

    `busy` says what the thread of the device does, `busy_seconds` for how long without a break,
    and `busy_at` where it stands, once that is more than a moment.

    `version` may be that of an adapter, and of `base` then too where one asks for it.

    `lines`: of adapters that are held the name, by version, where a trainer has several.

    `restorable_version` is one whose directory the engine may read again, to go back to it.
    `deterministic`: a seeded sample is the same to the bit whatever runs beside it.
    `takes_min_new_tokens`: it can keep a sample from ending.
    """

    version: int | None
    digest: str
    prepared_versions: tuple[int, ...]
    paused: bool
    rank_loads: tuple[RankLoad, ...]
    max_running: int
    max_model_length: int
    restorable_version: int | None = None
    base: ServedWeights | None = None  # that adapters are put on
    adapters: tuple[ServedWeights, ...] = ()  # that are held, oldest first
    lines: Mapping[int, str] = field(default_factory=dict)
    last_pause_seconds: float = 0.0
    last_prepare_seconds: float = 0.0
    decode_tokens_total: int = 0
    prefill_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0  # of prompts, that were in the cache already
    restarts_total: int = 0  # of servers that were lost
    failure: str = ""
    busy: str = ""
    busy_seconds: float = 0.0
    busy_at: str = ""
    deterministic: bool = False
    takes_min_new_tokens: bool = False
    asleep: bool = False
    transfer_ranks: int = 0  # that it takes in a transfer group; 0: it reads directories only
    profile: EngineProfile | None = None  # that was asked for last


class EngineService(NamedTuple):
    """A gRPC service of an engine's own, to be served beside the others."""

    register: Callable[[Any, Any], None]
    servicer: object
    name: str


class Engine(ABC):
    """One replica. All methods are called on one event loop, which they never block."""

    def services(self) -> Sequence[EngineService]:
        """Returns what it serves to parts of itself that run elsewhere."""
        return ()

    @abstractmethod
    async def start(self) -> None:
        """Starts serving; with a configured model the weights are loaded as version 0."""

    @abstractmethod
    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Yields deltas of all samples as they come; closing the iterator aborts the request.

        The request begins with the first `anext`, which raises NoWeightsError without weights,
        PromptTooLongError, MediaUnsupportedError, DuplicateRequestError, QueueFullError,
        NoTokenizerError or InvalidFieldError.
        EngineFailedError comes at any time when the engine breaks or closes.
        """

    @abstractmethod
    async def score(
        self, token_ids: Sequence[int], prompt_length: int, version: int | None = None
    ) -> list[float]:
        """Returns log-probabilities (temperature 1) of token_ids[prompt_length:].

        By weights of `version`, which the engine holds; None: by those that serve.
        """

    async def score_top(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int,
        version: int | None = None,
    ) -> TokenScores:
        """Scores, and names the `top_count` likeliest tokens at each place.

        Raises NoTopTokensError where the engine cannot name them.
        """
        raise NoTopTokensError("this engine names no likeliest tokens")

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests, keeping their partial tokens; returns the ids of those that ran."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stops decoding; new requests wait until `resume`. Returns when nothing decodes."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def prepare(self, version: int, digest: str, directory: Path) -> None:
        """Loads and verifies a version beside the serving one, while generating.

        `directory` stays as it is while the status names the version in any way.
        Raises DigestMismatchError naming the tensor when bytes differ from the manifest, or
        the manifest from `digest`; UnfitWeightsError for weights of another architecture.
        """

    @abstractmethod
    async def stage(self, path: Path, shard: ShardFile) -> None:
        """Checks, and perhaps reads, a file of the one version that is in the making.

        `prepare` then need not read it again, if the file is the same and the manifest has these
        digests. Several calls may run at a time. Raises DigestMismatchError naming the tensor,
        or UnfitWeightsError.
        """

    @abstractmethod
    def unstage(self) -> None:
        """Forgets what was staged."""

    def check_incoming(self, manifest: Manifest) -> None:
        """Raises UnfitWeightsError for a version that `receive` could not take."""
        raise NotImplementedError

    async def join_transfer(self, groups: Sequence[Membership], seconds: float) -> None:
        """Joins these groups, one for each sender, and leaves those joined before.

        The engine takes the ranks from `Membership.rank` on, as many as `transfer_ranks` of its
        status says; a backend of which that is 0 is never asked. See
        `sluice.weights.transfer.plan`.
        Raises TransferBrokenError when the others do not come in time.
        """
        raise NotImplementedError

    async def leave_transfer(self) -> None:
        """Leaves the groups joined last, so that no member waits for this one."""
        raise NotImplementedError

    async def receive(self, incoming: IncomingWeights) -> None:
        """Takes a version from the groups joined last, as `prepare` does from a directory.

        An engine that cannot hold two versions takes it in a pause and serves it at the return.
        Returns, or raises, within `incoming.seconds`: TransferBrokenError, DigestMismatchError
        naming the tensor, UnfitWeightsError. After an error the serving version is as before.
        """
        raise NotImplementedError

    @abstractmethod
    async def commit(self, version: int, mode: PauseMode) -> float:
        """Swaps a prepared version in; returns the seconds in which nothing was decoded.

        Raises VersionNotPreparedError. A paused engine stays paused.
        """

    async def sleep(self) -> None:
        """Gives up the device's memory, weights and cache; free when asleep already.

        Meanwhile nothing is prepared or committed. Raises NoSleepError, or NotQuietError unless the
        engine is paused and holds no request.
        """
        raise NoSleepError("this engine keeps its memory")

    async def wake(self) -> None:
        """Takes the memory back; the next version may then be committed. A paused engine stays so.

        Raises NoSleepError.
        """
        raise NoSleepError("this engine keeps its memory")

    @abstractmethod
    async def profile(self, order: ProfileOrder) -> EngineProfile:
        """Records passes from now on, and returns once it does; the status tells how it goes.

        One that still records is dropped. What is sampled stays the same, and what goes wrong with
        a profile ends nothing else.
        """

    @abstractmethod
    def status(self) -> EngineStatus: ...

    @abstractmethod
    async def close(self) -> None: ...


def create_engine(name: str, config: EngineConfig, tokenizer: Path | None = None) -> Engine:
    """Imports and builds the engine `name` (a key of ENGINES; the config checked it).

    `tokenizer`: directory of the one that stop strings are found by; None: that of the model.
    """
    engine: Engine = import_named(ENGINES[name])(config, tokenizer)
    return engine


def check_generation(
    generation: Generation,
    vocabulary_size: int,
    max_length: int,
    config: EngineConfig,
    *,
    dp_size: int = 1,
) -> None:
    """Checks a request before it is queued, of text: images are what its prompt has become.

    Raises InvalidFieldError naming the field, MediaUnsupportedError or PromptTooLongError.
    """
    sampling = generation.sampling
    _check_tokens("prompt_token_ids", generation.prompt_token_ids, vocabulary_size)
    if sampling.stop_token_ids:  # one that is never sampled would end nothing
        _check_tokens("sampling.stop_token_ids", sampling.stop_token_ids, vocabulary_size)
    if generation.media:
        raise MediaUnsupportedError(TEXT_ONLY)
    if sampling.max_new_tokens < 1:
        raise InvalidFieldError("sampling.max_new_tokens", "must be at least 1")
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise InvalidFieldError("sampling.min_new_tokens", MIN_TOKENS)
    if sampling.temperature and not is_temperature(sampling.temperature):
        raise InvalidFieldError("sampling.temperature", f"{TEMPERATURES}, or 0")
    if sampling.top_k < 0:
        raise InvalidFieldError("sampling.top_k", "must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidFieldError("sampling.top_p", "must be above 0 and at most 1")
    if generation.sample_count < 1:
        raise InvalidFieldError("sample_count", "must be at least 1")
    if sampling.seeds and len(sampling.seeds) != generation.sample_count:
        raise InvalidFieldError("sampling.seeds", "must be empty or one per sample")
    if any(not -(1 << 63) <= seed < 1 << 63 for seed in sampling.seeds):
        raise InvalidFieldError("sampling.seeds", "must be 64-bit integers")
    if not 0 <= generation.dp_rank < dp_size:
        raise InvalidFieldError("dp_rank", f"this engine has ranks 0..{dp_size - 1}")
    length = len(generation.prompt_token_ids)
    if config.cache_tokens < max_length:
        check_room(length, config.cache_tokens, "engine.max_cached_tokens")
    check_room(length, max_length)
    reserved = min(length + sampling.max_new_tokens, max_length)
    if reserved > config.cache_tokens:
        raise PromptTooLongError(
            f"prompt and response of {reserved} tokens do not fit a cache of {config.cache_tokens}",
            length=reserved,
            limit=config.cache_tokens,
        )


def check_stop(stop: Sequence[str], field: str) -> None:
    """Raises InvalidFieldError for a stop string that cannot be looked for."""
    if "" in stop:
        raise InvalidFieldError(field, "an empty text ends nothing")
    if any(len(text) > LONGEST_STOP for text in stop):
        raise InvalidFieldError(field, f"a text has at most {LONGEST_STOP:,} characters")


def check_score(
    token_ids: Sequence[int], prompt_length: int, vocabulary_size: int, max_length: int
) -> None:
    """Checks a scoring. Raises InvalidFieldError naming the field, or PromptTooLongError."""
    _check_tokens("token_ids", token_ids, vocabulary_size)
    if not 1 <= prompt_length < len(token_ids):
        raise InvalidFieldError("prompt_length", "must leave context and tokens to score")
    check_length(len(token_ids), max_length)


def _check_tokens(field: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    if not len(token_ids):
        raise InvalidFieldError(field, "must not be empty")
    if min(token_ids) < 0 or max(token_ids) >= vocabulary_size:
        raise InvalidFieldError(field, f"must be in 0..{vocabulary_size - 1}")


def check_length(length: int, limit: int) -> None:
    """Raises PromptTooLongError where so many tokens exceed the model length."""
    if length > limit:
        raise PromptTooLongError(
            f"{length} tokens exceed the limit of {limit} (engine.max_model_length)",
            length=length,
            limit=limit,
        )


def check_room(length: int, limit: int, setting: str = "engine.max_model_length") -> None:
    """Raises PromptTooLongError where a prompt leaves none for a token within what is set."""
    if length >= limit:
        raise PromptTooLongError(
            f"a prompt of {length} tokens leaves no room for an answer: {setting} is {limit}",
            length=length,
            limit=limit - 1,
        )
