"""Runs a scenario again and again, each time killed (-9) one file operation later.

Arguments: a Python file with `scenario(root, tell)`, and a directory. Run number n works in
`<directory>/<n>` and dies at its n-th audited operation (open, rename, mkdir, unlink, flock,
truncate, listdir ...); what it told before lies in `<directory>/<n>.told`. The last run finishes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

WATCHED = ("open", "os.", "fcntl.", "shutil.", "mmap.")


def run_once(scenario: Callable[..., None], directory: Path, limit: int) -> None:
    told = os.open(directory / f"{limit}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    count = 0

    def watch(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        if event.startswith(WATCHED):
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    scenario(directory / str(limit), lambda text: os.write(told, f"{text}\n".encode()))


def main() -> None:
    scenario = runpy.run_path(sys.argv[1])["scenario"]
    for limit in range(1, 2000):
        child = os.fork()
        if child == 0:
            run_once(scenario, Path(sys.argv[2]), limit)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit("the scenario never finished")


if __name__ == "__main__":
    main()
