"""The engine without its thread: who runs, one step at a time.

Continuous batching: every step carries one token of each running sample and, bounded, chunks
of new prompts; a sample starts in the very step that ends its prompt.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence

import torch

from services.rollout.backends.reference.batch import DecodeBatch, Deltas
from services.rollout.backends.reference.lanes import Lane, Prompt, Request, Scoring
from services.rollout.backends.reference.model import ServingModel
from services.rollout.backends.reference.outputs import Written
from services.rollout.backends.reference.passes import PromptWork, run_pass
from services.rollout.backends.reference.requests import check_generation, check_score
from services.rollout.backends.reference.weights import PreparedWeights
from services.rollout.engine import Delta, FinishReason, Generation, PauseMode
from services.rollout.engine_config import EngineConfig
from services.rollout.errors import NoWeightsError
from sluice.runtime.errors import QueueFullError, ServiceError

Outcome = Delta | list[float] | ServiceError  # a list answers a scoring
ROW_MULTIPLE = 16  # elementwise loops round otherwise in a vector register than in its remainder


class EngineCore:
    """Single-threaded. Requests have keys of the owner's; `outbox` gathers outcomes by key."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model: ServingModel | None = None
        self.version: tuple[int, str] | None = None
        self.paused: PauseMode | None = None
        self.draining = False  # someone waits for what runs to end: nothing new begins
        self.outbox: list[tuple[int, Outcome]] = []
        self.drawn_tokens = 0
        self.prefill_tokens = 0
        self._live: dict[int, Request | Scoring] = {}  # by key
        self._waiting: deque[Request | Scoring] = deque()
        self._active: list[Request | Scoring] = []  # prompts in work, or samples yet to start
        self._batch: DecodeBatch | None = None
        self._reserved = 0  # cache tokens promised to running samples
        self._unstarted = 0  # samples and scorings that have not begun

    @property
    def max_length(self) -> int:
        own = self.config.max_model_length
        return own if self.model is None else min(own, self.model.max_length)

    @property
    def running_count(self) -> int:
        return len(self._batch) if self._batch else 0

    @property
    def waiting_count(self) -> int:
        return self._unstarted

    @property
    def reserved_tokens(self) -> int:
        """Cache tokens promised to running samples."""
        return self._reserved

    @property
    def quiet(self) -> bool:
        """Nothing decodes, and nothing that has begun is left to a graceful pause."""
        held = self.paused in (PauseMode.IN_PLACE, PauseMode.ABORT)
        return held or not (self._active or self.running_count)

    @property
    def has_work(self) -> bool:
        return not self.quiet or (self._admitting and bool(self._waiting))

    @property
    def _admitting(self) -> bool:
        return self.paused is None and not self.draining

    def take_outbox(self) -> list[tuple[int, Outcome]]:
        taken, self.outbox = self.outbox, []
        return taken

    def pause(self, mode: PauseMode) -> None:
        """Admit nothing more. WAIT lets run what has begun, until `quiet`."""
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_running()

    def resume(self) -> None:
        self.paused = None

    @torch.inference_mode()
    def serve(self, model: ServingModel, weights: PreparedWeights) -> None:
        """Serve `weights` of `model` from the next step on; running samples keep their cache.

        Prompts whose samples have not all begun are encoded anew, since their first token
        would otherwise be drawn from the old weights and reported under the new version.
        """
        if self._batch is None:
            slots = self.config.max_running
            fixed = slots + -slots % ROW_MULTIPLE if self.config.deterministic else 0
            self.model = model
            self._batch = DecodeBatch(model.cache_shape, self.max_length, fixed)
        model.swap(weights.parameters)
        self.version = (weights.version, weights.digest)
        self._batch.mark(self.version)
        for item in self._active:
            item.prompt.restart()
            if isinstance(item, Scoring):
                item.logprobs.clear()

    def submit(self, key: int, generation: Generation) -> None:
        """Queue a request; its deltas come to the outbox. Raises typed errors."""
        model = self._serving()
        check_generation(generation, model.vocabulary_size, self.max_length, self.config)
        self._queue(generation.sample_count)
        length = len(generation.prompt_token_ids)
        sampling = generation.sampling
        seeds = sampling.seeds or tuple(
            secrets.randbits(63) for _ in range(generation.sample_count)
        )
        self._live[key] = request = Request(
            key=key,
            generation=generation,
            prompt=Prompt(torch.tensor(generation.prompt_token_ids, dtype=torch.int64), length),
            seeds=seeds,
            stops=tuple(model.stop_token_ids | frozenset(sampling.stop_token_ids)),
            budget=min(sampling.max_new_tokens, self.max_length - length),
        )
        self._waiting.append(request)

    def submit_score(self, key: int, token_ids: Sequence[int], prompt_length: int) -> None:
        """Queue a scoring; its log-probabilities come to the outbox."""
        model = self._serving()
        check_score(token_ids, prompt_length, model.vocabulary_size, self.max_length)
        self._queue(1)
        prompt = Prompt(torch.tensor(token_ids, dtype=torch.int64), len(token_ids))
        self._live[key] = scoring = Scoring(key=key, prompt=prompt, first=prompt_length)
        self._waiting.append(scoring)

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End requests with what they have; returns those that were here."""
        wanted = set(request_ids)
        requests = [item for item in self._live.values() if isinstance(item, Request)]
        found = [request for request in requests if request.request_id in wanted]
        self._drop(found)
        return [request.request_id for request in found]

    def abort_running(self) -> None:
        """End all requests that have begun; what waits goes on waiting, scorings go on."""
        self._drop([item for item in self._begun() if isinstance(item, Request)])

    def fail_running(self, error: ServiceError) -> None:
        """End all that has begun with an error."""
        self.outbox += [(item.key, error) for item in self._begun()]
        self._drop(self._begun())

    def discard(self, key: int) -> None:
        """End what `key` stands for, if it has not ended."""
        if key in self._live:
            self._drop([self._live[key]])

    def _begun(self) -> list[Request | Scoring]:
        waiting = set(self._waiting)
        return [item for item in self._live.values() if item not in waiting]

    @torch.inference_mode()
    def _drop(self, gone: Sequence[Request | Scoring]) -> None:
        if not gone:
            return
        keys = {item.key for item in gone}
        self._waiting = deque(item for item in self._waiting if item.key not in keys)
        self._active = [item for item in self._active if item.key not in keys]
        if self._batch is not None:
            lanes = {lane for lane in self._batch.lanes if lane.request.key in keys}
            self._hand_out(self._batch.abort(lanes))
        for item in gone:
            self._live.pop(item.key, None)
            self._unstarted -= item.unstarted
            if isinstance(item, Request):
                for index in range(item.started, item.generation.sample_count):
                    empty = Lane(item, index).delta(Written((), (), ()), FinishReason.ABORTED)
                    self.outbox.append((item.key, empty))

    @torch.inference_mode()
    def step(self) -> None:
        """One pass over the model, if there is anything to do."""
        assert self.model is not None
        assert self._batch is not None
        assert self.version is not None
        self._admit()
        works = self._prompt_work()
        result = run_pass(self.model, self._batch, works, apart=self.config.deterministic)
        self.prefill_tokens += sum(work.chunk for work in works)
        self.drawn_tokens += len(self._batch)
        unsettled = False
        if result.decode_logits is not None:
            unsettled = self._batch.advance(result.decode_logits)
        self._take_prompts(works)
        if self._start_lanes() or unsettled:
            self._hand_out(self._batch.settle())
        if self._batch.streaming:
            self._hand_out(self._batch.stream())

    def _serving(self) -> ServingModel:
        if self.model is None or self.version is None:
            raise NoWeightsError("the engine has no weights yet")
        return self.model

    def _queue(self, samples: int) -> None:
        if self._unstarted + samples > self.config.waiting_limit:
            raise QueueFullError(
                f"{self._unstarted} samples wait already", limit=self.config.waiting_limit
            )
        self._unstarted += samples

    def _admit(self) -> None:
        if not self._admitting:
            return
        pending = [item for item in self._active if isinstance(item, Request)]
        slots = self.config.max_running - self.running_count
        slots -= sum(request.unstarted for request in pending)
        tokens = self.config.cache_tokens - self._reserved
        tokens -= sum(request.unstarted * request.reserved for request in pending)
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, Request):
                if slots < 1 or tokens < item.reserved:
                    return
                slots -= item.unstarted
                tokens -= item.unstarted * item.reserved
            self._active.append(self._waiting.popleft())

    def _prompt_work(self) -> list[PromptWork]:
        """The next chunks, in order of arrival, prefill_chunk_tokens together at most."""
        budget, works = self.config.prefill_chunk_tokens, []
        for item in self._active:
            missing = item.prompt.length - item.prompt.done
            chunk = min(missing, budget)
            if self.config.deterministic:  # chunks end where they would alone
                chunk = min(missing, self.config.prefill_chunk_tokens)
            if not 0 < chunk <= budget:
                if missing:
                    break
                continue
            first = item.first if isinstance(item, Scoring) else None
            works.append(PromptWork(item.prompt, chunk, first))
            budget -= chunk
        return works

    def _take_prompts(self, works: Sequence[PromptWork]) -> None:
        scored = {id(work.prompt): work for work in works if work.score_from is not None}
        for item in [item for item in self._active if isinstance(item, Scoring)]:
            if work := scored.get(id(item.prompt)):
                item.logprobs += work.logprobs
            if item.prompt.done == item.prompt.length:
                self._active.remove(item)
                self._unstarted -= 1
                del self._live[item.key]
                self.outbox.append((item.key, item.logprobs))

    def _start_lanes(self) -> bool:
        """Start as many samples as there is room for; their prompt is ready."""
        assert self._batch is not None
        assert self.version is not None
        slots = self.config.max_running - self.running_count
        tokens = self.config.cache_tokens - self._reserved
        groups: list[tuple[Request, list[Lane]]] = []
        for request in self._active:
            if not isinstance(request, Request) or request.prompt.logits is None:
                continue
            count = min(request.unstarted, slots, tokens // request.reserved)
            if count < 1:
                break
            groups.append((request, [Lane(request, request.started + i) for i in range(count)]))
            slots -= count
            tokens -= count * request.reserved
        if not groups:
            return False
        self._batch.start(groups, self.version)
        for request, lanes in groups:
            request.started += len(lanes)
            self._reserved += len(lanes) * request.reserved
            self._unstarted -= len(lanes)
            self.drawn_tokens += len(lanes)
            if not request.unstarted:
                self._active.remove(request)
                request.prompt.restart()
        return True

    def _hand_out(self, deltas: Deltas) -> None:
        for lane, delta in deltas:
            request = lane.request
            self.outbox.append((request.key, delta))
            if delta.finish_reason is not None:
                self._reserved -= request.reserved
                request.ended += 1
                if request.ended == request.generation.sample_count:
                    del self._live[request.key]
