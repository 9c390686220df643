"""Programs of strangers get at nothing, whoever runs them; without walls the same ones do."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from sluice.sandbox.programs import Ending, SandboxLimits, check_sandbox, run_program
from tests.patience import PATIENCE
from tests.sandbox.hostile import CASES
from tests.sandbox.trial import HANGS
from tests.sandbox.users import OWN, ROOT, USERS, Trials, as_user, interpreter

pytestmark = pytest.mark.isolation
PATIENT = {"seconds": PATIENCE}
X86 = platform.machine() == "x86_64"
REFUSED = {  # system calls that a container or an old kernel may refuse, by their numbers
    "unshare": (272 if X86 else 97,),
    "mount": (165 if X86 else 40,),
    "pivot_root": (155 if X86 else 41,),
    "mount_setattr": (442,),
    "prlimit64": (302 if X86 else 261,),
    "pidfd_open": (434,),
    "prctl(22)": (157 if X86 else 167, 22),
    "prctl(1)": (157 if X86 else 167, 1),
}


@pytest.mark.parametrize("user", USERS, ids=lambda user: f"user{user}")
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_a_hostile_program_gets_at_nothing(trials: Trials, case: str, user: int) -> None:
    trial = trials.of("jail", user)[case]
    assert not trial["escapes"]
    assert trial["seconds"] < HANGS


@pytest.mark.parametrize("case", [case.name for case in CASES if case.open_too])
def test_without_walls_it_does(trials: Trials, case: str) -> None:
    assert trials.of("open", OWN)[case]["escapes"]


@pytest.mark.parametrize(
    ("case", "ending"),
    [
        ("memory by many", "memory"),
        ("endless output", "output"),
        ("drops of output", "time"),
        ("sleeps with its output closed", "time"),
        ("stops itself", "time"),
        ("ignores signals", "time"),
        ("fork bomb", "time"),
        ("crash", f"signal {signal.SIGSEGV.value}"),
    ],
)
def test_what_ended_a_program_is_told(trials: Trials, case: str, ending: str) -> None:
    assert trials.of("jail", OWN)[case]["ending"].startswith(ending)


@pytest.mark.parametrize("killed", ["caller", "keeper"])
def test_a_killed_parent_leaves_no_program(killed: str) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    run = (
        "import sys\nfrom sluice.sandbox.programs import *\n"
        "limits = SandboxLimits(seconds=3600)\n"
        "files = {'program.py': 'import os, time\\nos.fork()\\nos.setsid()\\ntime.sleep(3600)'}\n"
        f"run_program(files, ['program.py', {mark!r}], '', limits)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", run], cwd=ROOT)
    try:
        _wait_until(lambda: len(_marked(mark)) == 2)
        (keeper,) = psutil.Process(caller.pid).children()
        family = [keeper, *keeper.children(recursive=True)]
        assert len(family) == 4  # the first process of the namespaces, the program, its fork
        os.kill(caller.pid if killed == "caller" else keeper.pid, signal.SIGKILL)
        _wait_until(lambda: not any(_runs(process) for process in family) and not _marked(mark))
    finally:
        caller.kill()
        caller.wait()


def test_the_open_leaves_it_behind() -> None:
    """What the test above would find, were there no namespace to end."""
    mark = f"mark-{uuid.uuid4().hex}"
    run = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; "
        f"time.sleep(3600)', {mark!r}])"
    )
    caller = subprocess.Popen([sys.executable, "-c", run])
    _wait_until(lambda: len(_marked(mark)) == 1)
    caller.kill()
    caller.wait()
    (left,) = _marked(mark)
    left.kill()


def test_nothing_of_a_program_is_left_for_the_next() -> None:
    first = "for name in ('sitecustomize.py', 'json.py', 'x'): open(name, 'w').write('print(1)')\n"
    run_program({"program.py": first}, ["program.py"], "", SandboxLimits(**PATIENT))
    second = "import json, os\nprint(sorted(os.listdir('.')))"
    outcome = run_program({"program.py": second}, ["program.py"], "", SandboxLimits(**PATIENT))
    assert outcome.output == b"['program.py']\n"


def test_files_beside_a_program_do_not_replace_its_library() -> None:
    files = {"program.py": "import json, sys\nprint(json.loads('1'), sys.path)", "json.py": "1 / 0"}
    outcome = run_program(files, ["program.py"], "", SandboxLimits(**PATIENT))
    assert outcome.output.startswith(b"1 [") and b"site-packages" not in outcome.output


@pytest.mark.parametrize(
    ("limits", "program", "more"),
    [
        ({"seconds": 0.5}, "import time; time.sleep(2); print('done')", {}),
        ({"cpu_seconds": 1}, "import time\nwhile time.process_time() < 1.6: pass\nprint('done')",
         {}),
        ({"memory_mib": 64}, "b = bytes(100 << 20); print('done')", {}),
        ({"processes": 2}, "import os\nfor _ in 'ab':\n  if not os.fork(): os._exit(0)\n"
         "print('done')", {}),
        ({"file_mib": 1}, "if open('f', 'wb', 0).write(bytes(2 << 20)) == 2 << 20: print('done')",
         {"file_mib": 2}),
        ({"disk_mib": 1}, "[open(c, 'wb', 0).write(bytes(1 << 20)) for c in 'abc']; print('done')",
         {}),
        ({"output_bytes": 4}, "print('done')", {"output_bytes": 5}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_limit_ends_what_a_larger_one_lets_pass(
    limits: dict[str, float], program: str, more: dict[str, float]
) -> None:
    files = {"program.py": program}
    within = run_program(files, ["program.py"], "", SandboxLimits(**PATIENT, **more))
    assert within.ending is Ending.EXIT and within.output.endswith(b"done\n")
    beyond = run_program(files, ["program.py"], "", SandboxLimits(**limits))
    assert not beyond.output.endswith(b"done\n")


def test_a_program_longer_than_its_room_for_files_is_run() -> None:
    program = "#" * (3 << 20) + "\nprint('done')"
    outcome = run_program(
        {"program.py": program}, ["program.py"], "", SandboxLimits(disk_mib=1, **PATIENT)
    )
    assert outcome.output == b"done\n"


def test_input_and_output_are_bytes_for_bytes() -> None:
    given = "".join(map(chr, range(1, 0xD800))) * 4 + "\udc80\0"
    program = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    outcome = run_program({"program.py": program}, ["program.py"], given, SandboxLimits(**PATIENT))
    assert outcome.output == given.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("user", USERS, ids=lambda user: f"user{user}")
@pytest.mark.parametrize("call", REFUSED)
def test_where_the_kernel_refuses_nothing_is_run(call: str, user: int) -> None:
    told = _ask(user, *map(str, REFUSED[call]))
    assert told.startswith("refused: ") and "it needs Linux" in told, told


@pytest.mark.parametrize("user", USERS, ids=lambda user: f"user{user}")
def test_where_it_refuses_nothing_all_is_run(user: int) -> None:
    assert _ask(user) == "ran\n"
    assert _ask(user, "9999") == "ran\n"


def test_where_no_namespace_may_be_made_nothing_is_run() -> None:
    """As `sysctl user.max_user_namespaces=0` has it, in a user namespace of the test's own."""
    settings = as_user(OWN)
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    forbid += f"{interpreter(OWN)} -m tests.sandbox.refusing"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid]
    told = subprocess.run(command, **settings, capture_output=True, text=True, check=True).stdout
    assert told.startswith("refused: ") and "unshare(CLONE_NEWUSER)" in told


def test_all_walls_stand() -> None:
    check_sandbox()


def _ask(user: int, *arguments: str) -> str:
    command = [interpreter(user), "-m", "tests.sandbox.refusing", *arguments]
    done = subprocess.run(command, **as_user(user), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def _marked(mark: str) -> list[psutil.Process]:
    """The processes whose last argument it is: programs, not those that start them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-1:] == [mark]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
