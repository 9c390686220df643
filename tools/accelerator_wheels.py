"""`python -m tools.accelerator_wheels FOLDER [--python 3.12] [--also NAME ...]`.

Fills FOLDER with the wheels (manylinux, x86-64) that a machine with an accelerator, torch and
transformers lacks for `tools.accelerator_check`, in the versions of constraints.txt, and checks
them: every package that the check imports is in them or usually there, what a wheel needs is too,
and together they are small enough to carry along. The last line is
`wheels: python=<v> files=<n> mb=<x> imports=<n> missing=0`.
"""

from __future__ import annotations

import argparse
import email.message
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.accelerator_check.packages import ROOT, WheelError, third_party
from tools.accelerator_check.steps import STEPS

LACKING = (
    "pydantic",
    "pydantic-settings",
    "grpcio",
    "grpcio-status",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
    "googleapis-common-protos",
    "prometheus-client",
    "uvloop",
    "typing-extensions",  # pydantic wants a newer one than torch
    "megatron-core",
)
USUALLY_THERE = (
    *("torch", "transformers", "numpy", "pyarrow", "aiohttp", "rich", "psutil", "xxhash"),
    # and what torch and transformers bring
    *("jinja2", "packaging", "pyyaml", "safetensors", "tokenizers", "typing-extensions"),
    "pillow",
)
MODULES = {"PIL": "pillow", "yaml": "pyyaml"}  # modules that are not called as their distribution
PLATFORMS = (  # pip knows no other names of one: protobuf's compiled part has the last alone
    *("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64"),
    "manylinux2014_x86_64",
)
LIMIT_MB = 20.0
DOWNLOAD_SECONDS = 600


def download(names: Iterable[str], folder: Path, python: str) -> None:
    """Fetch the wheels of `names` without what they need. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for name in PLATFORMS:
        command += ["--platform", name]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder), *names]
    subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS)


def fill(folder: Path, python: str, also: Iterable[str] = ()) -> list[Path]:
    """All wheels, with those that they need in turn. `also` are usually there, but not now."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    there = {canonicalize_name(name) for name in USUALLY_THERE} - set(also)
    wanted = {str(canonicalize_name(name)) for name in (*LACKING, *also)}
    fetched: set[str] = set()
    while new := wanted - fetched:
        download(sorted(new), folder, python)
        fetched |= new
        wanted |= needed(folder.glob("*.whl"), python) - there
    return sorted(folder.glob("*.whl"))


def needed(wheels: Iterable[Path], python: str) -> set[str]:
    """Distributions that these wheels require on that Python, by their own word."""
    environment: dict[str, Any] = {**default_environment(), "python_version": python, "extra": ""}
    environment |= {"python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "platform_machine": "x86_64"}
    found = set()
    for wheel in wheels:
        for text in _metadata(wheel).get_all("Requires-Dist") or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                found.add(canonicalize_name(requirement.name))
    return {str(name) for name in found}


def provided(wheels: Iterable[Path]) -> set[str]:
    """Modules and packages in these wheels: `grpc`, `google.rpc`, `megatron.core`."""
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                parts = re.sub(r"(\.[\w-]+)?\.(py|so)$", "", name).split("/")
                found |= {".".join(parts[:depth]) for depth in (1, 2)}
    return found


def check(wheels: list[Path], python: str, also: Iterable[str] = ()) -> list[str]:
    """Names of what the check imports. Raises WheelError where the wheels would not do."""
    imported = third_party(root for step in STEPS for root in step.roots)
    there = {canonicalize_name(name) for name in USUALLY_THERE} - set(also)
    inside = provided(wheels)
    lacking = [
        f"{name} (imported by {user})"
        for name, user in sorted(imported.items())
        if name not in inside and canonicalize_name(MODULES.get(name, name)) not in there
    ]
    names = {canonicalize_name(str(_metadata(wheel)["Name"])) for wheel in wheels}
    lacking += sorted(str(name) for name in needed(wheels, python) - names - there)
    if lacking:
        raise WheelError(f"neither in the wheels nor usually there: {', '.join(lacking)}")
    if not set(also) and (size := megabytes(wheels)) > LIMIT_MB:
        raise WheelError(f"{size:.1f} MB of wheels, more than {LIMIT_MB:g}")
    return sorted(imported)


def megabytes(wheels: Iterable[Path]) -> float:
    return sum(wheel.stat().st_size for wheel in wheels) / 1e6


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[2])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--also", action="append", default=[], help="what it lacks besides")
    flags = parser.parse_args()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    try:
        wheels = fill(flags.folder, flags.python, flags.also)
        imported = check(wheels, flags.python, flags.also)
    except (WheelError, subprocess.SubprocessError) as error:
        print(f"accelerator-wheels: {error}", file=sys.stderr)
        return 1
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    print(
        f"wheels: python={flags.python} files={len(wheels)} mb={megabytes(wheels):.1f} "
        f"imports={len(imported)} missing=0"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
