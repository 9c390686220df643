"""Steps the model: admits requests, encodes their prompts, decodes their samples."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Delta,
    FinishReason,
    Generation,
    PauseMode,
    Sampling,
    ServedWeights,
    TokenScores,
    check_generation,
    check_score,
    waiting_text,
)
from services.rollout.engine.reference.adapters import Rows, ServingAdapter
from services.rollout.engine.reference.attention import (
    Block,
    DecodeBlock,
    ForwardPlan,
    PrefillPrompt,
    PrefixCache,
    PromptBlock,
    Shown,
    Sight,
)
from services.rollout.engine.reference.batch import (
    DecodeBatch,
    Deltas,
    Lane,
    Request,
    Scoring,
    TopTokens,
)
from services.rollout.engine.reference.drawing import Written
from services.rollout.engine.reference.graphs import DecodeGraphs, bucket, obstacle
from services.rollout.engine.reference.loading import PreparedWeights
from services.rollout.engine.reference.model import ServingModel
from services.rollout.errors import (
    NonFiniteLogitsError,
    NotQuietError,
    NoWeightsError,
    VersionUnavailableError,
)
from sluice.algo.likeliest import find_likeliest
from sluice.runtime.errors import InvalidFieldError, QueueFullError, ServiceError
from sluice.samples.stops import StopSearch

NOTHING_SHOWN = Sight((), torch.empty(3, 0, dtype=torch.int64), {})


@dataclass(eq=False)
class PromptWork:
    """The next `chunk` tokens of a prompt; with `score_from`, its tokens are scored from there."""

    prompt: PrefillPrompt
    chunk: int
    score_from: int | None = None
    top_count: int = 0  # likeliest tokens to name at each scored place
    logprobs: list[float] = field(default_factory=list)  # of the tokens scored in this pass
    top: list[TopTokens] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.prompt.done + self.chunk

    @property
    def whole(self) -> bool:
        return self.chunk == self.prompt.length

    def wanted(self) -> range:
        """Returns the rows of the chunk whose logits are read."""
        if self.score_from is not None:
            first = max(self.score_from - 1 - self.prompt.done, 0)
            return range(first, min(self.chunk, self.prompt.length - 1 - self.prompt.done))
        return range(self.chunk - 1, self.chunk) if self.end == self.prompt.length else range(0)


def run_pass(
    model: ServingModel,
    batch: DecodeBatch,
    works: Sequence[PromptWork],
    *,
    apart: bool,
    graphs: DecodeGraphs | None = None,
) -> torch.Tensor | None:
    """Runs one forward pass; logits float32[batch width, V] of decoding samples, None without any.

    Decoding and prompts share one pass; with `apart` each prompt chunk has one of its own.
    With `graphs` a pass without prompts, by the model alone, may be replayed.
    Prompts end up with their cache filled and, when complete, their last logits; scored ones
    with log-probabilities in their work.
    """
    if apart:
        for work in works:
            _run(model, None, [work], apart=True)
        return _run(model, batch, [], apart=True) if len(batch) else None
    if not works and not len(batch):
        return None
    if not works and graphs is not None and not model.adapters.held:
        tokens, _, blocks = batch.inputs()
        decoding = [block for block in blocks if isinstance(block, DecodeBlock)]
        model.adapters.share((), whole=False)
        if (logits := graphs.run(tokens, decoding)) is not None:
            return logits
    return _run(model, batch, works, apart=False)


def _run(
    model: ServingModel, batch: DecodeBatch | None, works: Sequence[PromptWork], *, apart: bool
) -> torch.Tensor | None:
    device = model.cache_shape.device
    tokens, positions, blocks, keep = [], [], [], []
    width = batch.width if batch is not None else 0
    if batch is not None and width:
        decode_tokens, decode_positions, decode_blocks = batch.inputs()
        tokens.append(decode_tokens)
        positions.append(decode_positions.expand(3, -1))
        blocks += decode_blocks
        keep += list(range(width))
    ordered, first = [], width
    for members in _alike(works):
        blocks.append(_block(model, members))
        for work in members:
            tokens.append(work.prompt.token_ids[work.prompt.done : work.end].to(device))
            positions.append(work.prompt.positions(work.prompt.done, work.end).to(device))
            keep += [first + row for row in work.wanted()]
            first += work.chunk
            ordered.append(work)
    model.adapters.share(_owners(batch, width, ordered), whole=apart)
    plan = ForwardPlan(tuple(blocks))
    rows = torch.tensor(keep, dtype=torch.int64, device=device)
    shown = _show(model, ordered, width, apart=apart) if model.tower is not None else None
    logits = model.forward(torch.cat(tokens), torch.cat(positions, dim=1), plan, rows, shown)
    experts = model.take_experts()
    if experts is not None:
        if batch is not None and width:
            batch.note_experts(experts)
        for work, chosen in zip(
            ordered, experts[width:].split([work.chunk for work in ordered]), strict=True
        ):
            work.prompt.add_experts(chosen)
    _take(logits[width:], ordered)
    return logits[:width] if width else None


def _owners(batch: DecodeBatch | None, width: int, works: Sequence[PromptWork]) -> Iterator[Rows]:
    """Whose the rows of a pass are, in its order."""
    if batch is not None and width:
        for lane in batch.lanes:
            yield lane.request.prompt.weights, 1
        yield None, width - len(batch)
    for work in works:
        yield work.prompt.weights, work.chunk


def _show(
    model: ServingModel, works: Sequence[PromptWork], first: int, *, apart: bool
) -> Shown | None:
    """What images show at the tokens of a pass, whose token `first` is the first of the works."""
    images: dict[str, bytes] = {}
    places: list[
        tuple[str, slice, int]
    ] = []  # an image, which of its tokens, first row of the pass
    for work in works:
        start, sight = work.prompt.done, work.prompt.sight or NOTHING_SHOWN
        for span in sight.within(start, work.end):
            images[span.digest] = sight.images[span.digest]
            begin, end = max(start, span.first_token), min(work.end, span.end)
            tokens = slice(begin - span.first_token, end - span.first_token)
            places.append((span.digest, tokens, first + begin - start))
        first += work.chunk
    if not places:
        return None
    model.look(images, apart=apart)
    rows = [torch.arange(row, row + part.stop - part.start) for _, part, row in places]
    features = [[layer[part] for layer in model.features(digest)] for digest, part, _ in places]
    layers = [torch.cat(parts) for parts in zip(*features, strict=True)]
    return Shown(torch.cat(rows).to(layers[0].device), layers)


def _alike(works: Sequence[PromptWork]) -> list[list[PromptWork]]:
    """Whole prompts of one length share a block; a chunk of a longer one stands alone."""
    groups: dict[object, list[PromptWork]] = {}
    for work in works:
        groups.setdefault(work.chunk if work.whole else work, []).append(work)
    return list(groups.values())


def _block(model: ServingModel, works: list[PromptWork]) -> Block:
    prompt = works[0].prompt
    if prompt.kv is None:
        kv = model.cache_shape.allocate(len(works), prompt.length)
        for index, work in enumerate(works):
            work.prompt.kv = kv[:, :, index]
    else:
        kv = prompt.kv.unsqueeze(2)
    return PromptBlock(count=len(works), chunk=works[0].chunk, start=prompt.done, kv=kv)


def _take(logits: torch.Tensor, works: Sequence[PromptWork]) -> None:
    first = 0
    for work in works:
        wanted, done = work.wanted(), work.prompt.done
        rows = logits[first : first + len(wanted)]
        first += len(wanted)
        work.prompt.done = work.end
        if work.score_from is not None:
            targets = work.prompt.token_ids[done + wanted.start + 1 : done + wanted.stop + 1]
            chosen = rows.gather(1, targets.to(rows.device)[:, None])[:, 0]
            normalizer = rows.logsumexp(-1)
            work.logprobs = (chosen - normalizer).tolist()
            if work.top_count:
                work.top = _likeliest(rows, normalizer, work.top_count)
        elif work.prompt.done == work.prompt.length:
            work.prompt.logits = rows[0]


def _likeliest(logits: torch.Tensor, normalizer: torch.Tensor, count: int) -> list[TopTokens]:
    """Per row of `logits` [N, V]; log-probabilities round as those of the scored tokens do."""
    values, tokens = find_likeliest(logits, min(count, logits.shape[1]))
    logprobs = (values - normalizer[:, None]).tolist()
    return [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), logprobs, strict=True)]


Item = Request | Scoring


class Intake:
    """Queues requests in order of arrival until all their samples have begun.

    `waiting` items are untouched; `active` ones have prompts in work or samples to start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.waiting: deque[Item] = deque()
        self.active: list[Item] = []
        self.unstarted = 0  # samples, and scorings that have not ended
        self._config = config
        # A prompt that continues a cached one is cut in other chunks than it would be alone.
        self.prefixes = PrefixCache(0 if config.deterministic else config.prefix_cache_tokens)

    def push(self, item: Item) -> None:
        """Queues an item. Raises QueueFullError."""
        limit = self._config.waiting_limit
        if self.unstarted + item.unstarted > limit:
            raise QueueFullError(waiting_text(self.unstarted, item.unstarted, limit), limit=limit)
        if isinstance(item, Request):
            item.prompt.chain = self.prefixes.chain(item.prompt)
        self.unstarted += item.unstarted
        self.waiting.append(item)

    def admit(self, slots: int, tokens: int) -> None:
        """Takes up what waits, as long as free slots and cache tokens let a sample begin."""
        for item in self.active:
            slots -= item.samples_to_start
            tokens -= item.samples_to_start * item.reserved
        while self.waiting:
            item = self.waiting[0]
            if item.samples_to_start:
                if slots < 1 or tokens < item.reserved:
                    return
                slots -= item.samples_to_start
                tokens -= item.samples_to_start * item.reserved
            self.active.append(self.waiting.popleft())
            if isinstance(item, Request):
                item.admitted = time.monotonic()

    def next_chunks(self) -> list[PromptWork]:
        """Returns the prompt work of one pass, prefill_chunk_tokens together at most."""
        limit = self._config.prefill_chunk_tokens
        budget, works, openings = limit, [], set[int]()
        for item in self.active:
            prompt = item.prompt
            if not budget:
                break
            if prompt.done == prompt.length or not self._open(prompt, openings):
                continue
            openings.update(prompt.chain[:1])
            # Where a sample must not depend on others, chunks end where they would alone.
            room = limit if self._config.deterministic else budget
            chunk = min(prompt.length - prompt.done, room)
            if chunk > budget:
                break
            if isinstance(item, Scoring):
                works.append(PromptWork(prompt, chunk, item.first, item.top_count))
            else:
                works.append(PromptWork(prompt, chunk))
            budget -= chunk
        return works

    def take(self, works: Iterable[PromptWork]) -> list[Scoring]:
        """Notes what a pass did; returns the scorings that are complete."""
        by_prompt = {id(work.prompt): work for work in works}
        for work in by_prompt.values():
            if work.prompt.logits is not None:
                self.prefixes.insert(work.prompt)
        scorings = [item for item in self.active if isinstance(item, Scoring)]
        for scoring in scorings:
            if done := by_prompt.get(id(scoring.prompt)):
                scoring.logprobs += done.logprobs
                scoring.top += done.top
        complete = [s for s in scorings if s.prompt.done == s.prompt.length]
        self.drop([scoring.key for scoring in complete])
        return complete

    def startable(self, slots: int, tokens: int) -> list[tuple[Request, int]]:
        """Returns how many samples of which requests may begin: their prompt is encoded."""
        startable = []
        for item in self.active:
            if not isinstance(item, Request) or item.prompt.logits is None:
                continue
            count = min(item.unstarted, slots, tokens // item.reserved)
            if count < 1:
                break
            startable.append((item, count))
            slots -= count
            tokens -= count * item.reserved
        return startable

    def start(self, request: Request, count: int) -> None:
        """Notes that `count` more samples of a request have begun."""
        request.started += count
        self.unstarted -= count
        if not request.unstarted:
            self.active.remove(request)
            request.prompt.restart()

    def drop(self, keys: Collection[int]) -> None:
        """Forgets items."""
        for item in (*self.waiting, *self.active):
            if item.key in keys:
                self.unstarted -= item.unstarted
        self.waiting = deque(item for item in self.waiting if item.key not in keys)
        self.active = [item for item in self.active if item.key not in keys]

    def follow(self, items: Sequence[Item], weights: ServedWeights) -> None:
        """Gives items other weights: prompts that are in work begin anew."""
        active, waiting = set(self.active), set(self.waiting)
        for item in items:
            item.prompt.weights = weights
            if item not in active and item not in waiting:
                continue  # all its samples run
            if isinstance(item, Request):
                item.prompt.chain = self.prefixes.chain(item.prompt)
            if item not in active:
                continue
            item.prompt.restart()
            if isinstance(item, Scoring):
                item.logprobs.clear()
                item.top.clear()

    def _open(self, prompt: PrefillPrompt, openings: Collection[int]) -> bool:
        """Whether to encode now; False when one in work begins alike and will be cached."""
        if prompt.kv is not None or self.prefixes.adopt(prompt):
            return True
        return not any(block in openings for block in prompt.chain[:1])


Outcome = Delta | TokenScores | ServiceError
ROW_MULTIPLE = 16  # elementwise loops round otherwise in a vector register than in its remainder


class EngineCore:
    """Serves requests on one thread. Keys are the owner's; `outbox` gathers outcomes by key."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model: ServingModel | None = None
        self.base: ServedWeights | None = None  # the model, without adapters
        self.version: ServedWeights | None = None  # what serves whoever names no version
        self.paused: PauseMode | None = None
        self.asleep = False
        self.draining = False  # someone waits for what runs to end: nothing new begins
        self.outbox: list[tuple[int, Outcome]] = []
        self.drawn_tokens = 0
        self.prefill_tokens = 0
        self.reserved_tokens = 0  # of the cache, promised to running samples
        # around each pass, told what it does
        self.passing: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._live: dict[int, Item] = {}  # by key
        self._intake = Intake(config)
        self._batch: DecodeBatch | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def max_length(self) -> int:
        own = self.config.max_model_length
        return own if self.model is None else min(own, self.model.max_length)

    @property
    def running_count(self) -> int:
        return len(self._batch) if self._batch else 0

    @property
    def waiting_count(self) -> int:
        return self._intake.unstarted

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache instead of being encoded."""
        return self._intake.prefixes.hit_tokens

    @property
    def quiet(self) -> bool:
        """Nothing decodes, and nothing that has begun is left to a graceful pause."""
        stopped = self.paused in (PauseMode.IN_PLACE, PauseMode.ABORT)
        return stopped or not (self._intake.active or self.running_count)

    @property
    def has_work(self) -> bool:
        return not self.quiet or (self._admitting and bool(self._intake.waiting))

    @property
    def _admitting(self) -> bool:
        return self.paused is None and not self.draining

    @property
    def most_cached(self) -> str:
        """What running samples may take of memory, and the settings that say so."""
        config, tokens = self.config, self.config.cache_tokens
        setting = f"max_running {config.max_running} x max_model_length {config.max_model_length}"
        if config.max_cached_tokens:
            setting = f"max_cached_tokens {config.max_cached_tokens}"
        size = 0 if self.model is None else tokens * self.model.cache_shape.token_bytes
        return (
            f"samples may keep {size / 2**30:.1f} GiB of keys and values ({setting}), beside "
            "weights and passes: set engine.max_cached_tokens to less"
        )

    def take_outbox(self) -> list[tuple[int, Outcome]]:
        taken, self.outbox = self.outbox, []
        return taken

    def pause(self, mode: PauseMode) -> None:
        """Admits nothing more. WAIT lets run what has begun, until `quiet`."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_running()

    def resume(self) -> None:
        self.paused = None

    @torch.inference_mode()
    def serve(
        self, model: ServingModel, weights: PreparedWeights
    ) -> list[torch.nn.Parameter | None]:
        """Serves `weights` of `model` from the next step on; running samples keep their cache.

        Returns the parameters that served, for another thread to free.

        Prompts whose samples have not all begun are encoded anew, since their first token
        would otherwise be drawn from the old weights and reported under the new version.
        """
        if self._batch is None:
            slots = self.config.max_running
            fixed = slots + -slots % ROW_MULTIPLE if self.config.deterministic else 0
            self.model = model
            captures = self.config.decode_graphs != "off" and not obstacle(model)
            self._graphs = DecodeGraphs(model) if captures else None
            pad_rows = bucket if captures else None
            self._batch = DecodeBatch(model.cache_shape, self.max_length, fixed, pad_rows)
        if self._graphs is not None:
            self._graphs.clear()
        retired = model.swap(weights.parameters)
        self._intake.prefixes.clear()
        self.base = ServedWeights(weights.version, weights.digest)
        self._follow(self.base, list(self._live.values()))
        return retired

    @torch.inference_mode()
    def sleep(self) -> list[object]:
        """Serves nothing from now on, and keeps neither weights nor cache.

        Paused by abort, it ends what waits too. Returns what is to be freed. Raises NotQuietError
        unless paused, and without a request then.
        """
        if self.paused is PauseMode.ABORT:
            scorings = [item for item in self._live.values() if isinstance(item, Scoring)]
            self.outbox += [(item.key, NoWeightsError("the engine sleeps")) for item in scorings]
            self._drop(list(self._live.values()))
        if self.paused is None or self._live:
            raise NotQuietError("pause the engine, by abort or after its requests, to sleep")
        self.asleep, self.base, self.version = True, None, None
        self._intake.prefixes.clear()
        freed: list[object] = [self._batch]
        self._batch = self._graphs = None
        if self.model is not None:
            freed += [*self.model.adapters.release(0, ()), *self.model.drop()]
        return freed

    @torch.inference_mode()
    def serve_adapter(self, adapter: ServingAdapter, *, drain: bool) -> list[ServingAdapter]:
        """Serves an adapter from the next step on, to whoever names no version.

        One of several serves those alone that name it, and changes nothing for others. With
        `drain` what has begun goes on under the weights that it has. Returns the adapters that are
        let go.
        """
        assert self.model is not None
        assert self._batch is not None
        if adapter.line:
            self.model.adapters.add(adapter)
            return self._release_adapters({adapter.version})
        if drain:
            for item in self._begun():
                item.pinned = True
        self.model.adapters.add(adapter)
        self._follow(adapter.weights, [i for i in self._live.values() if not i.pinned])
        return self._release_adapters()

    def _follow(self, weights: ServedWeights, items: Sequence[Item]) -> None:
        assert self._batch is not None
        self.version = weights
        self._intake.follow(items, weights)
        self._batch.mark()

    def _release_adapters(self, new: Collection[int] = ()) -> list[ServingAdapter]:
        """Lets go of adapters that nobody uses, beyond the limit."""
        assert self.model is not None
        assert self.version is not None
        used = {*new, *(item.prompt.served.version for item in self._live.values())}
        return self.model.adapters.release(self.config.max_adapters, used | {self.version.version})

    @property
    def lines(self) -> dict[int, str]:
        """The names of adapters that are held, by version, of those that have one."""
        held = {} if self.model is None else self.model.adapters.held
        return {version: adapter.line for version, adapter in held.items() if adapter.line}

    @property
    def adapters(self) -> list[ServedWeights]:
        """The adapters that are held, in the order of their commits."""
        return [] if self.model is None else [a.weights for a in self.model.adapters.held.values()]

    def submit(self, key: int, generation: Generation, searches: Sequence[StopSearch] = ()) -> None:
        """Queues a request; its deltas come to the outbox. Raises typed errors.

        `searches`: one per sample, where it has stop strings.
        """
        model = self._serving()
        shown = model.images.read(
            generation.prompt_token_ids, generation.media, generation.processor
        )
        text = replace(generation, prompt_token_ids=shown.token_ids, media=())
        check_generation(text, model.vocabulary_size, self.max_length, self.config)
        sampling, prompt = generation.sampling, model.prompt(shown, generation.media)
        prompt.weights = self._pick(generation.version)
        fresh = (secrets.randbits(63) for _ in range(generation.sample_count))
        request = Request(
            key=key,
            generation=text,
            prompt=prompt,
            pinned=generation.version is not None,
            seeds=sampling.seeds or tuple(fresh),
            stops=self._stops(model, sampling),
            budget=min(sampling.max_new_tokens, self.max_length - prompt.length),
            searches=searches,
        )
        self._intake.push(request)
        self._live[key] = request

    def _stops(self, model: ServingModel, sampling: Sampling) -> tuple[int, ...]:
        """Tokens that end a sample. Raises InvalidFieldError where none is left to begin with."""
        own = model.unsampled if sampling.ignore_eos else model.stop_token_ids
        stops = own | frozenset(sampling.stop_token_ids)
        if sampling.min_new_tokens and stops.issuperset(range(model.vocabulary_size)):
            raise InvalidFieldError("sampling.min_new_tokens", "every token ends a sample")
        return tuple(stops)

    def submit_score(
        self,
        key: int,
        token_ids: Sequence[int],
        prompt_length: int,
        top_count: int = 0,
        version: int | None = None,
    ) -> None:
        """Queues a scoring, by weights that are held if it names any; scores come to the outbox."""
        model = self._serving()
        check_score(token_ids, prompt_length, model.vocabulary_size, self.max_length)
        model.images.check_text(token_ids)
        prompt = PrefillPrompt.of(token_ids)
        prompt.weights = self._pick(version)
        scoring = Scoring(
            key=key,
            prompt=prompt,
            pinned=version is not None,
            first=prompt_length,
            top_count=top_count,
        )
        self._intake.push(scoring)
        self._live[key] = scoring

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests with what they have; returns the ids of those that ran."""
        wanted = set(request_ids)
        requests = [item for item in self._live.values() if isinstance(item, Request)]
        aborted = [request for request in requests if request.request_id in wanted]
        self._drop(aborted)
        return [request.request_id for request in aborted]

    def abort_running(self) -> None:
        """Ends all requests that have begun; what waits goes on waiting, scorings go on."""
        self._drop([item for item in self._begun() if isinstance(item, Request)])

    def discard(self, key: int) -> None:
        """Ends what `key` stands for, if it has not ended."""
        if key in self._live:
            self._drop([self._live[key]])

    @torch.inference_mode()
    def step(self) -> None:
        """Runs one pass over the model, if there is anything to do."""
        assert self.model is not None
        assert self._batch is not None
        if self._admitting:
            self._intake.admit(*self._room())
        works = self._intake.next_chunks()
        count, tokens = len(self._batch), sum(work.chunk for work in works)
        what = f"pass: {count} samples, {tokens} prompt tokens"
        with self.passing(what) if works or count else nullcontext():
            self._advance(self.model, self._batch, works)
        self.prefill_tokens += tokens

    def _advance(
        self, model: ServingModel, batch: DecodeBatch, works: Sequence[PromptWork]
    ) -> None:
        """Runs the pass, and does what follows from it."""
        apart = self.config.deterministic
        logits = run_pass(model, batch, works, apart=apart, graphs=self._graphs)
        self.drawn_tokens += len(batch)
        unsettled = logits is not None and batch.advance(logits)
        for scoring in self._intake.take(works):
            del self._live[scoring.key]
            scores = TokenScores(logprobs=tuple(scoring.logprobs), top=tuple(scoring.top))
            self.outbox.append((scoring.key, scores))
        unsettled |= self._start_lanes()
        if broken := batch.take_broken():
            self._fail_broken(broken)
        if unsettled:
            self._hand_out(batch.settle())
        if batch.streaming:
            self._hand_out(batch.stream())
        if len(model.adapters.held) > self.config.max_adapters:
            self._release_adapters()

    def _fail_broken(self, keys: Collection[int]) -> None:
        """End requests whose logits are not finite; others may be of other adapters."""
        error = NonFiniteLogitsError("the weights give logits that are not finite")
        self.outbox += [(key, error) for key in sorted(keys)]
        self._drop([self._live[key] for key in sorted(keys)])

    def _serving(self) -> ServingModel:
        if self.model is None or self.version is None:
            raise NoWeightsError(
                "the engine sleeps" if self.asleep else "the engine has no weights yet"
            )
        return self.model

    def _pick(self, version: int | None) -> ServedWeights:
        """The weights of that version. Raises VersionUnavailableError for one not held."""
        assert self.base is not None
        assert self.version is not None
        if version is None:
            return self.version
        for weights in (self.base, *self.adapters):
            if weights.version == version:
                return weights
        raise VersionUnavailableError(
            f"version {version} is not held", serving=self.version.version, exact_version=version
        )

    def _begun(self) -> list[Item]:
        waiting = set(self._intake.waiting)
        return [item for item in self._live.values() if item not in waiting]

    def _room(self) -> tuple[int, int]:
        """Returns free slots and cache tokens."""
        tokens = self.config.cache_tokens - self.reserved_tokens
        return self.config.max_running - self.running_count, tokens

    def _start_lanes(self) -> bool:
        """Starts as many samples as there is room for."""
        assert self._batch is not None
        groups = [
            (request, [Lane(request, request.started + number) for number in range(count)])
            for request, count in self._intake.startable(*self._room())
        ]
        if not groups:
            return False
        self._batch.start(groups)
        for request, lanes in groups:
            self._intake.start(request, len(lanes))
            self.reserved_tokens += len(lanes) * request.reserved
            self.drawn_tokens += len(lanes)
        return True

    @torch.inference_mode()
    def _drop(self, gone: Sequence[Item]) -> None:
        if not gone:
            return
        keys = {item.key for item in gone}
        self._intake.drop(keys)
        if self._batch is not None:
            lanes = {lane for lane in self._batch.lanes if lane.request.key in keys}
            self._hand_out(self._batch.abort(lanes))
        for item in gone:
            self._live.pop(item.key, None)
            if isinstance(item, Request):
                for index in range(item.started, item.generation.sample_count):
                    empty = Lane(item, index).delta(Written((), (), ()), FinishReason.ABORTED)
                    self.outbox.append((item.key, empty))

    def _hand_out(self, deltas: Deltas) -> None:
        for lane, delta in deltas:
            request = lane.request
            self.outbox.append((request.key, delta))
            if delta.finish_reason is not None:
                self.reserved_tokens -= request.reserved
                request.ended += 1
                if request.ended == request.generation.sample_count:
                    del self._live[request.key]
