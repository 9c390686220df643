"""A process ends as Python ends it, but for taking its modules apart."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE

PROGRAM = """
import atexit, sys, threading
from sluice.imports import run_process

class Held:
    def __del__(self):
        print("taken apart", flush=True)

held = [Held()]
held.append(held)  # looked through at the end alone
begun = threading.Event()

def work():
    begun.set()
    threading.main_thread().join()
    print("the thread's last words")

def main():
    atexit.register(print, "the handler's last words")
    threading.Thread(target=work).start()
    begun.wait()
    print("the program's last words")
    if len(sys.argv) > 1:
        raise ValueError("a bug")
    return 3

run_process(main)
"""
LAST_WORDS = ["the program's", "the thread's", "the handler's"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_threads_and_handlers_have_their_last_words_and_modules_are_left_as_they_are() -> None:
    done = run()
    assert done.stdout.splitlines() == [f"{who} last words" for who in LAST_WORDS]
    assert (done.returncode, done.stderr) == (3, "")


def test_an_exception_is_reported_as_ever() -> None:
    done = run("raise")
    assert done.stdout.splitlines()[:3] == [f"{who} last words" for who in LAST_WORDS]
    assert "taken apart" in done.stdout, "Python ends it"
    assert done.returncode == 1 and "ValueError: a bug" in done.stderr
