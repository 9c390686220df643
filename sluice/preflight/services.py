"""The services that a services.yaml would start, each looked at by its own package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.config import ConfigError, no_model_text
from sluice.config_faults import examine_file, examine_values
from sluice.doctor import look_at_port
from sluice.durable import DirectoryError, owned
from sluice.finding import WRONG
from sluice.imports import import_named
from sluice.platform import PlatformError
from sluice.preflight.findings import UNTYPED, Findings
from sluice.preflight.service import LookedAt
from sluice.runtime.addresses import names_of
from sluice.stack import (
    CONFIGS,
    HTTP_SECTIONS,
    LOOPBACK,
    Kind,
    ServiceEntry,
    UpConfig,
    check_fits_here,
    filled_in,
    http_section,
    node_name,
    policy_trainer,
    router_name,
    services_entry,
    trainer_name,
)

LOOKS = {
    "trainer": "services.trainer.preflight:look",
    "rollout": "services.rollout.preflight:look",
}
SOMEWHERE = "127.0.0.1:1"  # stands for addresses that are known once services run


@dataclass
class Services:
    """Those of a services.yaml by name, as far as they are looked at."""

    config: UpConfig
    looks: dict[str, LookedAt] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The services.json that the supervisor writes."""
        return self.config.run_dir / "services.json"

    @property
    def entries(self) -> dict[str, dict[str, str]]:
        """What that says of each process, but for addresses."""
        config = self.config
        return {
            node_name(entry.name_of(name, replica), node): services_entry(config, entry, node)
            for name, entry in config.services.items()
            for replica in range(entry.replicas)
            for node in range(entry.nodes)
        }

    def of(self, kind: Kind) -> dict[str, LookedAt]:
        """Those of a kind that could be looked at."""
        services = self.config.services
        return {name: look for name, look in self.looks.items() if services[name].kind == kind}

    def process(self, called: str) -> LookedAt | None:
        """The service that a run knows by a name: its own, or that of its kind."""
        process = names_of(self.entries).get(called, "")
        for name, entry in self.config.services.items():
            if process in (entry.name_of(name, replica) for replica in range(entry.replicas)):
                return self.looks.get(name)
        return None


def look_at_services(path: str, findings: Findings, usage: str) -> Services | None:
    """Look at all services of a file; None where it is none."""
    subject = Path(path).name
    examined = examine_file(UpConfig, path, [], usage)
    for fault in examined.faults:
        findings.wrong(subject, fault)
    if examined.config is None:
        return None
    config = examined.config
    services = Services(config)
    first = 0  # accelerators of the services before
    served = None if (name := policy_trainer(config)) is None else config.services[name].config
    for name, entry in config.services.items():
        _look_at_place(name, entry, first, findings)
        first += entry.accelerators * entry.processes
        _look_at_service(services, name, entry, served or {}, findings)
    _look_at_ports(config, findings)
    return services


def _look_at_place(name: str, entry: ServiceEntry, first: int, findings: Findings) -> None:
    """What this machine lacks another may have, on which the services are to be started."""
    elsewhere = "fine where they are to run on another machine; check it there"
    try:
        check_fits_here(name, entry)
        for process in range(entry.processes):
            entry.environment(process, first)
    except (ConfigError, PlatformError) as error:
        findings.warn(name, str(error), elsewhere)


def _look_at_service(
    services: Services,
    name: str,
    entry: ServiceEntry,
    policy: Mapping[str, Any],
    findings: Findings,
) -> None:
    config = services.config
    if not isinstance(entry.config.get("server", {}), dict):
        findings.wrong(name, "server: must be a mapping of its settings")
        return
    values = filled_in(config, entry.name_of(name, 0), entry)
    with findings.expecting(name):
        if entry.kind in ("rollout", "gateway"):
            values.setdefault("router", SOMEWHERE)
            if entry.kind == "gateway" or "router" not in entry.config:
                router_name(config)
        if entry.kind == "gateway":
            values.setdefault("trainer", SOMEWHERE)
            if "trainer" not in entry.config:
                trainer_name(config)
    examined = examine_values(import_named(CONFIGS[entry.kind]), values)
    for fault in examined.faults:
        findings.wrong(name, fault)
    if examined.config is None:
        return
    if entry.kind not in LOOKS:
        model = getattr(examined.config, "model", None)
        if model is not None and not (Path(model) / "config.json").is_file():
            findings.wrong(name, f"model: {no_model_text(model)}")
        return
    look = _look(entry.kind, examined.config, policy, is_sound=not examined.faults)
    services.looks[name] = look
    for fault in look.faults:
        findings.wrong(name, fault)
    for note in look.notes:
        findings.warn(name, note)
    shown = entry.accelerators or len(entry.devices) // entry.processes
    if look.local_ranks > shown > 0:
        findings.wrong(
            name,
            f"ranks.count: {look.local_ranks} ranks take a device each, and the service is shown "
            f"{shown} (devices, or resources): give it as many",
        )
    if not (examined.faults or look.faults):
        size = f", {look.size.parameters / 1e6:,.1f} M parameters" if look.size else ""
        count = f"{entry.replicas} x " if entry.replicas > 1 else ""
        findings.ok(name, f"{count}{look.described}{size}")
        if look.held:
            findings.ok(name, look.held)


def _look(kind: Kind, config: Any, policy: Mapping[str, Any], *, is_sound: bool) -> LookedAt:
    """What the package of a service says; of settings that are wrong, as far as it goes."""
    arguments: tuple[Any, ...] = (config,)
    if kind == "rollout":
        model = policy.get("model")
        served = Path(model) if isinstance(model, str) else None
        found = served is not None and (served / "config.json").is_file()
        arguments = (config, served if found else None)
    try:
        look: LookedAt = import_named(LOOKS[kind])(*arguments)
    except (OSError, *UNTYPED):
        if is_sound:
            raise
        return LookedAt()  # what is wrong was told
    return look


def _look_at_ports(config: UpConfig, findings: Findings) -> None:
    """Ports that settings name; those of services that run already are theirs."""
    if is_up(config.run_dir):
        findings.ok("services.yaml", f"its services run now, in {config.run_dir}")
        return
    taken: dict[tuple[str, int], str] = {}
    for name, host, key, port in _ports(config):
        own = f"{name}, {key}"
        if (other := taken.setdefault((host, port), own)) != own:
            findings.wrong(name, f"{key}: {port} is that of {other} too, at {host}; leave one out")
        elif (found := look_at_port(host, port)).state == WRONG:
            findings.wrong(name, f"{key}: {found.text}", found.remedy)


_AGAIN = "server.port of each replica"


def _ports(config: UpConfig) -> Iterator[tuple[str, str, str, int]]:
    """Service, host, setting and number of each port that is not left to the supervisor."""
    for name, entry in config.services.items():
        server = entry.config.get("server")
        server = server if isinstance(server, dict) else {}
        host = str(server.get("host", LOOPBACK))
        found = {f"server.{key}": server.get(key) for key in ("port", "metrics_port")}
        section = http_section(entry.kind, entry.config)
        own = entry.config.get(section) if section in HTTP_SECTIONS else None
        if isinstance(own, dict):
            found[f"{section}.port"] = own.get("port")
        for key, port in found.items():
            if isinstance(port, int) and 0 < port < 1 << 16:
                yield name, host, key, port
                if entry.processes > 1:
                    yield name, host, _AGAIN, port


def is_up(run_dir: Path) -> bool:
    """Whether a supervisor has its services in a directory now."""
    if not (run_dir / ".up.lock").exists():
        return False
    try:
        with owned(run_dir, "up"):
            return False
    except DirectoryError:
        return True
