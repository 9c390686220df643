"""Adapters beside the policy of the settings: begun and forgotten by calls, each by its name."""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from services.trainer.config import LoraConfig, TrainerConfig
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import PolicyState, TrainerState, Turns, in_turn
from services.trainer.controller.uploads import TrainerBatches
from services.trainer.errors import AdapterLimitError, AdaptersUnsupportedError
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import AlreadyExistsError, InvalidFieldError, ServiceError
from sluice.weights.adapter import check_name
from sluice.weights.errors import InvalidAdapterError


class TrainerAdapters:
    """The adapters of a trainer that calls began. Methods raise the errors that clients see."""

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainerState,
        ranks: RankGroup,
        batches: TrainerBatches,
        turns: Turns,
    ) -> None:
        self.turns = turns
        self._config, self._state = config, state
        self._ranks, self._batches = ranks, batches

    def settings(
        self, name: str, rank: int | None, alpha: float | None, targets: tuple[str, ...]
    ) -> LoraConfig:
        """Return what an adapter of that name is to be; what is not given is the trainer's own.

        Raises AdaptersUnsupportedError or InvalidFieldError.
        """
        own = self._config.lora
        if own is None:
            raise AdaptersUnsupportedError("this trainer trains the model itself: set lora")
        try:
            check_name(name)
        except InvalidAdapterError as error:
            raise InvalidFieldError("adapter", str(error)) from None
        alpha = own.alpha if alpha is None and rank is None else alpha
        given = {
            "rank": own.rank if rank is None else rank,
            "alpha": alpha,
            "targets": targets or own.targets,
            "max_adapters": own.max_adapters,
        }
        try:
            return LoraConfig.model_validate(given)
        except ValidationError as error:
            raise InvalidFieldError(*_wrong(error)) from None

    @in_turn
    async def create(
        self, name: str, settings: LoraConfig, learning_rate: float, seed: int | None = None
    ) -> PolicyState:
        """Begin an adapter on all ranks."""
        state, ranks = self._state, self._ranks.incarnation
        state.check_awake()
        if name in state.adapters:
            raise AlreadyExistsError("adapter", name)
        if len(state.adapters) >= settings.max_adapters:
            raise AdapterLimitError(
                f"{len(state.adapters)} adapters are held, as lora.max_adapters allows: delete one",
                limit=settings.max_adapters,
            )
        optim = self._config.optim.model_copy(update={"learning_rate": learning_rate})
        policy = PolicyState(adapter=name, settings=settings, optim=optim, seed=seed)
        await self.begin(ranks, policy)
        state.adapters[name] = policy
        return policy

    @in_turn
    async def delete(self, name: str) -> None:
        """Forget an adapter with its gradients and batches."""
        state, ranks = self._state, self._ranks.incarnation
        state.check_awake()
        state.policy(name)
        await self._batches.drop_all(ranks, name)
        await self._drop(ranks, name)
        del state.adapters[name]

    async def begin(self, ranks: RankIncarnation, policy: PolicyState) -> None:
        """Have ranks make an adapter; where one cannot, none has it."""
        settings = policy.settings
        assert settings is not None
        spec = settings.spec("0" * 32)
        command = pb.AddAdapter(
            name=policy.adapter,
            rank=spec.rank,
            alpha=spec.alpha,
            targets=spec.targets,
            seed=policy.seed,
        )
        try:
            await ranks.run(pb.FollowResponse(add_adapter=command))
        except ServiceError:
            with suppress(ServiceError):  # ranks that are lost hold nothing
                await self._drop(ranks, policy.adapter)
            raise

    async def _drop(self, ranks: RankIncarnation, name: str) -> None:
        await ranks.run(pb.FollowResponse(drop_adapter=pb.DropAdapter(name=name)))


def _wrong(error: ValidationError) -> tuple[str, str]:
    """Return the field that settings are wrong in, and why."""
    first = error.errors(include_url=False)[0]
    return str(first["loc"][0]) if first["loc"] else "targets", first["msg"]
