"""Trials of all hostile programs by users of several rights, each made once."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE
from tests.sandbox.trial import HANGS

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534
OWN = os.geteuid()
USERS = (OWN, NOBODY) if OWN == 0 else (OWN,)
ALL = (*(("jail", user) for user in USERS), ("open", OWN))


class Trials:
    """Gathers what each program did, by user and name; `jailed` are those of the own user too.

    All are made at once: most of their time is that of programs that wait until they are ended.
    """

    def __init__(self) -> None:
        self.jailed: dict[tuple[int, str], dict[str, Any]] = {}

    @cache  # noqa: B019 - lives as long as the session
    def of(self, mode: str, user: int) -> dict[str, dict[str, Any]]:
        done = self._made[mode, user].result()
        found = {trial["case"]: trial for trial in map(json.loads, done.stdout.splitlines())}
        assert not done.returncode, list(found)
        if mode == "jail":
            self.jailed |= {(user, name): trial for name, trial in found.items()}
        return found

    @cached_property
    def _made(self) -> dict[tuple[str, int], Future[subprocess.CompletedProcess[bytes]]]:
        pool = ThreadPoolExecutor(len(ALL), "trials")
        made = {(mode, user): pool.submit(_make, mode, user) for mode, user in ALL}
        pool.shutdown(wait=False)
        return made

    def line(self) -> str:
        escaped = sum(bool(trial["escapes"]) for trial in self.jailed.values())
        hung = sum(trial["seconds"] > HANGS for trial in self.jailed.values())
        return f"sandbox: cases={len(self.jailed)} escaped={escaped} hung={hung}"


def _make(mode: str, user: int) -> subprocess.CompletedProcess[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        command = [interpreter(user), "-m", "tests.sandbox.trial", mode, folder]
        return subprocess.run(command, **as_user(user), stdout=subprocess.PIPE, check=False)


def as_user(user: int) -> dict[str, Any]:
    """Arguments of `subprocess.run`."""
    paths = [str(ROOT), *site.getsitepackages()]
    values: dict[str, Any] = {"cwd": "/", "timeout": PATIENCE}
    values["env"] = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths)}
    if user != OWN:
        values |= {"user": user, "group": user, "extra_groups": []}
    return values


@cache
def interpreter(user: int) -> str:
    """A Python that the user may run: a copy of this one, where that lies out of its reach."""
    own = os.path.realpath(sys.executable)
    if user == OWN or _runs(own, user):
        return own
    copy = Path(tempfile.mkdtemp(prefix="sluice-python-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, copy)
    copy.chmod(0o755)
    left_out = shutil.ignore_patterns("site-packages", "test", "*.a", "idlelib", "tkinter")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in (Path(sys.base_prefix, "lib"),):
        shutil.copytree(folder / version, copy / "lib" / version, ignore=left_out)
        for library in folder.glob("libpython*"):
            shutil.copy2(library, copy / "lib")
    (copy / "bin").mkdir()
    shutil.copy2(own, copy / "bin" / version)
    found = str(copy / "bin" / version)
    assert _runs(found, user), f"user {user} can run no interpreter, or cannot read {ROOT}"
    return found


def _runs(python: str, user: int) -> bool:
    try:
        command = [python, "-c", "import sluice.sandbox.programs"]
        return not subprocess.run(
            command, **as_user(user), stderr=subprocess.DEVNULL, check=False
        ).returncode
    except PermissionError:
        return False
