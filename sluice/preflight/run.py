"""What a run would ask of its services, its data and its directories; nothing of it is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.algo.plugins import find
from sluice.algo.spec import AdvantageSpec, LossSpec, advantage_traits, loss_traits
from sluice.config import ConfigError
from sluice.doctor import look_at_port
from sluice.driver import check_named
from sluice.finding import WRONG
from sluice.loop.config import CommonRunConfig, RowsRunConfig, RunConfig
from sluice.loop.filters import GroupFilters
from sluice.loop.fit import check_rows_trainer
from sluice.loop.fleet import POOL
from sluice.loop.mixture import digest_of, load_schedule
from sluice.loop.replay import open_replay
from sluice.loop.run_directory import check_resumed, checked_run_checkpoint, settings_digests
from sluice.loop.tracking import chosen
from sluice.place import Place, directory_of, within
from sluice.preflight.findings import UNTYPED, Findings
from sluice.preflight.fit import look_at_fit
from sluice.preflight.places import look_at_places, look_at_room, look_at_run
from sluice.preflight.service import LookedAt
from sluice.preflight.services import Services, is_up
from sluice.preflight.tasks import OpenTasks, open_tasks, try_tasks
from sluice.runtime.addresses import check_known, names_of, read_entries
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import check_plugins
from sluice.stack import store_of, weights_of


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """A run by its settings, and the services that it would have; without them less is seen.

    rows: of each file and data set that are tried, from the first on; 0 is all. is_sound: whether
    the settings are; else what they lead to may be nothing that a run comes to.
    """

    config: CommonRunConfig
    services: Services | None
    findings: Findings
    rows: int
    is_sound: bool = True

    @property
    def entries(self) -> dict[str, dict[str, Any]] | None:
        """Of services.json as it would be, or is; None where there is none to know."""
        if self.services is not None:
            return dict(self.services.entries)
        path = self.config.services
        return None if path is None or not path.exists() else read_entries(path)

    @property
    def store(self) -> Place:
        """Where the run has its store. Raises ConfigError."""
        entries, path = self.entries, self.config.services
        if self.config.store is None and entries is not None and path is not None:
            return store_of(path, entries)
        return self.config.store_place

    @property
    def _trainer(self) -> LookedAt | None:
        return None if self.services is None else self.services.process("trainer")

    async def look(self) -> None:
        """Find all there is to find."""
        config, findings = self.config, self.findings
        with self._stage():
            self._look_at_names()
        with findings.expecting("trackers"):
            chosen(config.trackers)
        is_free = look_at_run(config.run_dir, findings)
        if config.server is not None and config.server.port and is_free:
            port = look_at_port(config.server.host, config.server.port)
            if port.state == WRONG:
                findings.wrong("server.port", port.text, port.remedy)
        if isinstance(config, RunConfig):
            await self._look_at_policy(config, is_free=is_free)
        elif isinstance(config, RowsRunConfig):
            with self._stage():
                self._look_at_rows(config, is_free=is_free)
        with self._stage():
            self._look_at_store()

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Of settings that are not sound, as far as it goes: what is wrong with them was told."""
        try:
            yield
        except UNTYPED:
            if self.is_sound:
                raise

    def _look_at_names(self) -> None:
        """The services that the run names, and the file that says where they are."""
        config, services, findings = self.config, self.services, self.findings
        if config.services is None:
            return
        if services is not None and config.services.absolute() != services.file.absolute():
            findings.wrong(
                "services",
                f"services: {config.services}, and the services write {services.file} (their "
                "run_dir); name that one",
            )
        if services is None:
            if not config.services.exists():
                findings.warn(
                    "services",
                    f"{config.services} is not there, which `sluice up` writes",
                    "--up SERVICES.yaml has its services looked at before",
                )
            else:
                findings.warn(
                    "services",
                    f"of those in {config.services} the names alone are looked at",
                    "--up SERVICES.yaml has their settings looked at too",
                )
        with findings.expecting("services"):
            if (entries := self.entries) is not None:
                self._check_names(config.services, entries)

    def _check_names(self, path: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
        config, known, expecting = self.config, names_of(entries), self.findings.expecting
        needed = [] if config.trainer else ["trainer"]
        if isinstance(config, RunConfig) and not (config.router or config.replay):
            needed.append("router")
        for name in needed:
            with expecting("services"):
                check_known(path, name, known)
        if not isinstance(config, RunConfig):
            return
        if config.critic is not None and not config.critic.address:
            with expecting("critic"):
                check_named("critic", config.critic.service, known)
        for name, teacher in config.teachers.items():
            if teacher.service:
                with expecting("teachers"):
                    check_named(f"teachers.{name}", teacher.service, known)
        for key, environment in config.environments_by_key.items():
            for service in _services_named(environment.settings, path):
                with expecting(key):
                    check_named(f"{key}.settings", service, entries)

    async def _look_at_policy(self, config: RunConfig, *, is_free: bool) -> None:
        findings, tasks = self.findings, list[OpenTasks]()
        with findings.calling("filters"):
            GroupFilters(config.filters)
        with findings.calling("environment_schedule"):
            load_schedule(config)
        with self._stage():
            self._look_at_algorithm(config)
        if config.replay is not None:
            with findings.expecting("replay"), self._stage():
                open_replay(config)
        else:
            with self._stage():
                tasks = open_tasks(config, findings)
            if is_free:
                with self._stage():
                    self._look_at_past(config, tasks)
        if self.services is None:
            return
        with self._stage():
            look_at_fit(config, self.services, findings)
        workers = self.services.of("rollout")
        engines = [w.engine for w in workers.values() if w.engine is not None and w.pool == POOL]
        limit = max((engine.max_model_length for engine in engines), default=0)
        with working_directory(), self._stage():
            await try_tasks(tasks, workers, limit, self.rows, findings)

    def _look_at_past(self, config: RunConfig, tasks: list[OpenTasks]) -> None:
        """Whether run_dir holds another run, or one that goes on as the settings want it."""
        keys = {f"environments.{n}.prompts" if n else "prompts": n for n in config.shares}
        sources = {keys[each.key]: each.source for each in tasks if each.key in keys}
        with self.findings.expecting("run_dir"):
            if sources.keys() == config.shares.keys():
                digests = settings_digests(config, digest_of(sources))
                check_resumed(config, digests, lambda text: self.findings.warn("run_dir", text))
            else:
                checked_run_checkpoint(config)

    def _look_at_algorithm(self, config: RunConfig) -> None:
        """Losses and advantages, of the trainer that would be asked for them."""
        trainer = self._trainer
        modules = None
        if trainer is not None and trainer.trainer is not None:
            modules = trainer.trainer.user_modules
        specs: dict[str, LossSpec | AdvantageSpec] = {
            "algorithm.loss": config.algorithm.loss,
            "algorithm.advantage": config.algorithm.advantage,
        }
        for key, spec in specs.items():
            field = key.partition(".")[2]
            try:
                if modules is not None:
                    check_plugins(field, spec.plugins, modules)
                with working_directory(), self.findings.calling(key):
                    for kind, name in _plugins_of(spec):
                        find(kind, name)
                    if isinstance(spec, LossSpec):
                        loss_traits(spec)
                    else:
                        advantage_traits(spec)
            except InvalidFieldError as error:
                self.findings.wrong(key, f"{key}: {error}")

    def _look_at_rows(self, config: RowsRunConfig, *, is_free: bool) -> None:
        """Of a run on rows: they are tokenised as its first steps would have them."""
        # nobody else tokenises rows
        from sluice.loop.rows_run import checked_settings, load_held_out, load_rows

        findings = self.findings
        trainer = self._trainer
        said = None if trainer is None else trainer.trainer
        if said is not None:
            with findings.expecting("trainer"):
                check_rows_trainer(config, said, "trainer")
        limit = 0 if said is None else said.max_row_tokens
        for key, load in (("rows", load_rows), ("held_out", load_held_out)):
            if key == "held_out" and config.held_out is None:
                continue
            with findings.expecting(key):
                rows = load(config)
                if key == "rows" and is_free:
                    with findings.expecting("run_dir"):
                        checked_settings(config, rows)
                self._look_at_lengths(key, rows, limit)

    def _look_at_lengths(self, key: str, rows: Any, limit: int) -> None:
        longest, seen = ("", 0), 0
        for where, found in rows.lengths(self.rows or rows.count):
            seen += 1
            if isinstance(found, str):
                self.findings.wrong(key, found)
            elif limit and found > limit:
                self.findings.wrong(
                    key,
                    f"{where}: {found} tokens, a micro-batch holds {limit}: give the trainer more "
                    "(max_tokens_per_micro_batch), or an oversize_policy: truncate, or alone",
                )
            elif found > longest[1]:
                longest = where, found
        self.findings.ok(
            key, f"{rows.count:,} rows; the longest of {seen} looked at has {longest[1]} tokens"
        )

    def _look_at_store(self) -> None:
        config, findings = self.config, self.findings
        try:
            store = self.store
        except ConfigError as error:
            findings.wrong("store", str(error))
            return
        self._look_at_same_store(store)
        look_at_places(config.run_dir, store, findings)
        checkpoint = config.initial_checkpoint
        folder = directory_of(within(store, checkpoint)) if checkpoint else None
        if folder is not None and not folder.is_dir():
            findings.wrong(
                "store",
                f"initial_checkpoint: {checkpoint} is not in the store, {store}",
            )
        if self.services is None:
            return
        named = ["trainer"]
        if isinstance(config, RunConfig) and config.critic is not None:
            named.append(config.critic.service)
        looks = filter(None, map(self.services.process, named))
        sizes = [look.size for look in looks if look.size]
        steps = config.steps if isinstance(config, RunConfig) else 1
        if not is_up(self.services.config.run_dir):
            look_at_room(config, store, sizes, steps, findings)

    def _look_at_same_store(self, store: Place) -> None:
        entries, path = self.entries, self.config.services
        if self.config.store is None or entries is None or path is None:
            return
        with self.findings.expecting("store"):
            theirs = store_of(path, entries)
            if _absolute(theirs) != _absolute(store):
                self.findings.wrong(
                    "store", f"store: {store}, and the trainer's is {theirs}; leave it out"
                )
        weights = weights_of(entries)
        if isinstance(self.config, RunConfig) and self.config.weights not in ("", weights):
            self.findings.wrong(
                "store",
                f"weights: {self.config.weights}, and the trainer's are in "
                f"{weights or 'the store'}; leave it out",
            )


def _absolute(place: Place) -> str:
    directory = directory_of(place)
    return str(place) if directory is None else str(directory.absolute())


def _plugins_of(spec: LossSpec | AdvantageSpec) -> Iterator[tuple[Any, str]]:
    """Kinds and names of users' classes."""
    kinds = {"name": "loss" if isinstance(spec, LossSpec) else "advantage", "kl_estimator": "kl"}
    for field, name in spec.plugins.items():
        yield kinds.get(field, "correction"), name


def _services_named(settings: Any, path: Path) -> Iterator[str]:
    """Services that settings name as FILE#NAME, of the services.json of the run."""
    if isinstance(settings, Mapping):
        for value in settings.values():
            yield from _services_named(value, path)
    elif isinstance(settings, str) and "#" in settings and "://" not in settings:
        file, _, name = settings.rpartition("#")
        if Path(file).absolute() == path.absolute():
            yield name


@contextmanager
def working_directory() -> Iterator[None]:
    """Has modules of the working directory be found, as services find them."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
