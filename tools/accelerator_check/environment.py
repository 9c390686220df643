"""What the machine has: versions, device, memory, and what is missing for which step."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tomllib
from importlib import metadata

from tools.accelerator_check.packages import ROOT, missing, third_party
from tools.accelerator_check.steps import STEPS
from tools.accelerator_check.work import StepWork

TOLD = (
    "torch",
    "transformers",
    "megatron-core",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "grpcio",
    "protobuf",
    "pydantic",
)


def run(work: StepWork) -> None:
    """Tell first what is missing: the device needs torch."""
    work.record(python=sys.version.split()[0])
    for name in TOLD:
        try:
            work.record(**{name: metadata.version(name)})
        except metadata.PackageNotFoundError:
            work.record(**{name: "missing"})
    for step in STEPS:
        if gone := missing(third_party(step.roots)):
            work.note(f"{step.name} cannot run; missing: {', '.join(gone)}")
    for text in _below_floors():
        work.note(text)
    platform = importlib.import_module("sluice.platform")  # which needs psutil
    current = platform.current()
    memory, described = current.memory(), current.describe()
    work.record(
        device=described.pop("name"),
        **described,
        memory_gib=round(memory.total / 2**30, 1),
        free_gib=round(memory.free / 2**30, 1),
        collective=current.collective,
        host_gib=round(platform.CPU.memory().total / 2**30, 1),
        cores=len(os.sched_getaffinity(0)),
        disk_gib=round(shutil.disk_usage(work.out).free / 2**30, 1),
    )


def _below_floors() -> list[str]:
    """Installed packages that are older than pyproject.toml asks for."""
    try:
        requirements = importlib.import_module("packaging.requirements")
    except ImportError:
        return ["versions were not compared with pyproject.toml: packaging is missing"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("reference", "megatron"):
        wanted += project["optional-dependencies"][extra]
    found = []
    for text in wanted:
        requirement = requirements.Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if version not in requirement.specifier:
            found.append(f"{requirement.name} {version} is here; {requirement} is wanted")
    return found
