"""How a run and its services go together, by what these would say of themselves."""

from __future__ import annotations

from sluice.loop.config import RunConfig
from sluice.loop.fit import SaidServices, checks_of
from sluice.loop.fleet import POOL, DescribedEngine
from sluice.loop.training import check_critic
from sluice.preflight.findings import Findings
from sluice.preflight.service import LookedAt
from sluice.preflight.services import Services
from sluice.samples.vocabulary import check_same


def look_at_fit(config: RunConfig, services: Services, findings: Findings) -> None:
    """Finds what a run would as it begins, and as it first asks for groups."""
    rollouts = services.of("rollout")
    trainer = services.process("trainer")
    if trainer is not None and trainer.trainer is not None:
        _look_at_said(config, services, trainer, findings)
        for name, look in rollouts.items():
            with findings.expecting(name):
                check_same(
                    f"tokenizer: the episode worker {name}",
                    look.vocabulary,
                    trainer.trainer.vocabulary,
                )
            if look.adapter_fault is None or trainer.adapter is None:
                continue
            if fault := look.adapter_fault(trainer.adapter):
                findings.wrong(name, f"what the trainer publishes {fault}")
        _look_at_teachers(config, services, trainer.trainer.vocabulary, findings)
    if config.replay is not None:
        return
    entries = services.config.services
    if {name for name, entry in entries.items() if entry.kind == "rollout"} == rollouts.keys():
        _look_at_roles(rollouts, findings)
    _look_at_counts(config, rollouts, trainer, findings)
    _look_at_answers(config, rollouts, findings)


def _look_at_said(
    config: RunConfig, services: Services, trainer: LookedAt, findings: Findings
) -> None:
    """By the checks that a run makes of services that run."""
    assert trainer.trainer is not None, "it says something"
    critic = None
    if config.critic is not None and not config.critic.address:
        found = services.process(config.critic.service)
        critic = None if found is None else found.trainer
        if critic is not None:
            with findings.expecting("critic"):
                check_critic(critic, config.critic.service)
    engines = [
        DescribedEngine(name, look.engine)
        for name, look in services.of("rollout").items()
        if look.engine is not None and look.pool == POOL
    ]
    said = SaidServices(trainer=trainer.trainer, critic=critic, engines=engines)
    for check in checks_of(config, said, lambda text: findings.warn("lengths", text)):
        with findings.expecting("run"):
            check()


def _look_at_teachers(
    config: RunConfig, services: Services, vocabulary: str, findings: Findings
) -> None:
    engines = [look for look in services.of("rollout").values() if look.engine is not None]
    for name, teacher in config.teachers.items():
        asked = services.process(teacher.service) if teacher.service else None
        if asked is not None and asked.trainer is not None:
            with findings.expecting("teachers"):
                check_same(f"teachers.{name}:", asked.trainer.vocabulary, vocabulary)
        if not teacher.pool:
            continue
        pools = {look.pool for look in engines}
        if teacher.pool not in pools:
            findings.wrong(
                "teachers",
                f"teachers.{name}.pool: no engine is of pool {teacher.pool!r}; there are: "
                f"{', '.join(sorted(pools)) or 'none'}",
            )
        for look in engines:
            if look.pool == teacher.pool and look.engine is not None:
                with findings.expecting("teachers"):
                    check_same(f"teachers.{name}:", look.engine.vocabulary, vocabulary)


def _look_at_roles(rollouts: dict[str, LookedAt], findings: Findings) -> None:
    """Whether somebody samples, and somebody plays; a run would wait for them."""
    if not any(look.engine is not None and look.pool == POOL for look in rollouts.values()):
        findings.wrong(
            "services",
            f"services: no rollout service has the role engine and is of pool {POOL}: nothing "
            "would be sampled",
        )
    if not any(look.open_episodes is not None for look in rollouts.values()):
        findings.wrong(
            "services", "services: no rollout service has the role episodes: no group would end"
        )


def _look_at_counts(
    config: RunConfig,
    rollouts: dict[str, LookedAt],
    trainer: LookedAt | None,
    findings: Findings,
) -> None:
    """Whether services take as many samples at once as the run asks for.

    Of an engine all of a group are asked for at once where no other engine has room.
    """
    most = max(share.samples_per_group or 0 for share in config.shares.values())
    for name, look in rollouts.items():
        for setting, limit in look.limits.items():
            if most > limit:
                tell = findings.warn if setting.startswith("engine.") else findings.wrong
                tell(name, f"{setting}: {limit} is less than samples_per_group, {most}")
    limit = 0 if trainer is None else trainer.limits.get("max_rows", 0)
    if 0 < limit < config.groups_per_step * most:
        findings.wrong(
            "trainer",
            f"max_rows: {limit} is less than a step has: groups_per_step "
            f"{config.groups_per_step} x samples_per_group {most}",
        )


def _look_at_answers(config: RunConfig, rollouts: dict[str, LookedAt], findings: Findings) -> None:
    """Whether an answer can be as long as the run lets it, behind whatever prompt."""
    engines = [look.engine for look in rollouts.values() if look.engine and look.pool == POOL]
    longest = max((engine.max_model_length for engine in engines), default=0)
    for name, share in config.shares.items():
        response = config.training_sampling(share).max_new_tokens
        own = config.environments.get(name)
        is_own = own is not None and own.sampling is not None
        key = f"environments.{name}.sampling" if is_own else "sampling"
        if 0 < longest <= response:
            findings.warn(
                "lengths",
                f"{key}.max_new_tokens: {response}, and engines take {longest} tokens, of the "
                "prompt too (engine.max_model_length): no answer is as long",
            )
