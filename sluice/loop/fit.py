"""Whether services can do what a run asks of them, by what they say of themselves.

Runs ask as they begin; `sluice check` asks of what services would say, by their settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.config import ConfigError
from sluice.loop.config import RowsRunConfig, RunConfig
from sluice.loop.fleet import (
    DescribedEngine,
    check_deterministic,
    check_min_new_tokens,
    longest_sample,
)
from sluice.loop.routing_replay import check_recorded, check_rows, check_sampled
from sluice.loop.training import check_lengths
from sluice.samples.vocabulary import check_same, vocabulary_digest

Note = Callable[[str], None]
Check = Callable[[], None]  # raises ConfigError


@dataclass(frozen=True, kw_only=True)
class SaidServices:
    """What the services of a run say of themselves."""

    trainer: trainer_pb.Trainer
    critic: trainer_pb.Trainer | None = None
    engines: Sequence[DescribedEngine] = ()


def checks_of(config: RunConfig, said: SaidServices, note: Note) -> Iterator[Check]:
    """Each of what must hold of the services of a run; `note` is told what is only to be known."""
    trainer, engines = said.trainer, said.engines
    yield partial(check_rows_fit, config, said, note)
    yield partial(check_reference, config, trainer)
    if config.samples_least:
        yield partial(check_min_new_tokens, engines)
    yield partial(check_transport, config, trainer)
    if config.deterministic:
        yield partial(check_deterministic, engines)
    yield partial(check_recorded, config.algorithm, trainer)
    yield partial(check_sampled, "trainer", trainer, engines)
    if said.critic is not None:
        yield partial(check_sampled, "critic", said.critic, engines)


def check_workers(vocabularies: Mapping[str, str], trainer: trainer_pb.Trainer) -> None:
    """Raises ConfigError for an episode worker whose tokens, by its address, are others."""
    for address, vocabulary in vocabularies.items():
        check_same(f"tokenizer: the episode worker {address}", vocabulary, trainer.vocabulary)


def check_rows_fit(config: RunConfig, said: SaidServices, note: Note) -> None:
    """Notes trainers that may be given longer samples than they take. Raises ConfigError."""
    trainers = {"trainer": said.trainer}
    if said.critic is not None:
        trainers["critic"] = said.critic
    samplings = [config.training_sampling(share) for share in config.shares.values()]
    response = max(sampling.max_new_tokens for sampling in samplings)
    for who, described in trainers.items():
        if why := check_lengths(who, described, longest_sample(said.engines), response):
            note(why)


def check_reference(config: RunConfig, trainer: trainer_pb.Trainer) -> None:
    """Raises ConfigError for a trainer whose reference cannot be a version of weights."""
    if not config.algorithm.reference_every:
        return
    why = trainer.fixed_reference
    if not trainer.HasField("fixed_reference"):
        why = "it is of an earlier release"
    if why:
        raise ConfigError(f"algorithm.reference_every: the trainer's reference stays: {why}")


def check_transport(config: RunConfig, trainer: trainer_pb.Trainer) -> None:
    """Raises ConfigError for a trainer that does not send weights as the run wants them."""
    if config.weight_transport != "collective":
        return
    if trainer.HasField("sends_weights") and not trainer.sends_weights:
        raise ConfigError(
            "weight_transport: collective, but the trainer sends no weights: set its "
            "transfer.enabled, or weight_transport: store"
        )
    if config.deterministic and trainer.write_behind:
        raise ConfigError(
            "deterministic: the trainer writes weights behind (transfer.write_behind), so "
            "that a crash may cost groups; set it to false, or weight_transport: store"
        )


def check_rows_trainer(config: RowsRunConfig, trainer: trainer_pb.Trainer, where: str) -> None:
    """Raises ConfigError for a trainer, at `where`, that cannot train on rows of a file so."""
    if trainer.head != config.head:
        raise ConfigError(
            f"trainer: the one at {where} has head: {trainer.head}, and "
            f"`sluice {config.kind}` needs head: {config.head}"
        )
    check_rows("trainer", trainer)
    check_same(
        f"tokenizer: {config.tokenizer}", vocabulary_digest(config.tokenizer), trainer.vocabulary
    )
