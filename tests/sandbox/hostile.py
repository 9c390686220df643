"""Programs that try to get out, each with what would show that it did.

A program is told in `facts` what lies outside (a file, a port, a process) and prints ESCAPED where
it got at something; what it cannot see itself, the one who runs it looks for. All are bounded, so
that the same program may run in the open: there it must escape, or the case shows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_START = "import ctypes, errno, json, mmap, os, signal, sys, threading, time\n"
_START += "facts = json.loads(sys.argv[1])\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_START += "say = lambda what: os.write(1, b'ESCAPED ' + str(what).encode() + b'\\n')\n"


@dataclass(frozen=True)
class Hostile:
    """`open_too`: the program can be run without walls, and gets out."""

    name: str
    code: str
    open_too: bool = True
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> str:
        return _START + self.code


def _of(name: str, code: str, *, open_too: bool = True, **limits: Any) -> Hostile:
    return Hostile(name, code.strip("\n") + "\n", open_too, limits)


_TRY = """
try:
    {0}
except Exception:
    pass
else:
    say({1!r})
"""


def _attempt(name: str, line: str, *, open_too: bool = True, **limits: Any) -> Hostile:
    """Escapes if the line raises nothing."""
    return _of(name, _TRY.format(line, name), open_too=open_too, **limits)


CASES = (
    # processes
    _of(
        "forks",
        """
made = 0
for _ in range(40):
    try:
        if not os.fork():
            time.sleep(30)
            os._exit(0)
        made += 1
    except OSError:
        break
if made >= 16:
    say(made)
os.killpg(0, signal.SIGKILL)
""",
    ),
    _of("fork bomb", "while True:\n    try: os.fork()\n    except OSError: pass", open_too=False),
    _of(
        "threads",
        """
try:
    for _ in range(40):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
    say("threads")
except RuntimeError:
    pass
os._exit(0)
""",
    ),
    _of(
        "daemon",
        """
if not os.fork():
    os.setsid()
    if not os.fork():
        os.close(1)
        sleep = "import time; time.sleep(60)"
        os.execv(sys.executable, [sys.executable, "-c", sleep, facts["mark"]])
    os._exit(0)
os.wait()
time.sleep(0.5)
""",
    ),
    _of(
        "signal to a process",
        """
for number in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.kill(facts["victim"], number)
    except OSError:
        pass
""",
    ),
    _of("signal to all", "os.kill(-1, signal.SIGKILL)", open_too=False),
    _of("signal to its parent", "os.kill(os.getppid(), signal.SIGKILL)", open_too=False),
    _of(
        "ptrace",
        """
libc.ptrace.argtypes = [ctypes.c_long] * 4
for victim in (facts["victim"], os.getppid(), 1):
    if libc.ptrace(0x4206, victim, 0, 0) == 0:
        say(victim)
""",
        open_too=False,
    ),
    _of("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", open_too=False),
    _of("sleeps", "time.sleep(3600)", open_too=False),
    _of(
        "sleeps with its output closed",
        "os.close(1)\nos.close(0)\ntime.sleep(3600)",
        open_too=False,
    ),
    _of("waits for a fifo", "os.mkfifo('fifo')\nopen('fifo')", open_too=False),
    _of("waits for input", "while True:\n    if not os.read(0, 1): break\ninput()", open_too=False),
    _of(
        "ignores signals",
        "for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
        "while True: pass",
        open_too=False,
    ),
    _of(
        "deep recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): return [f(), f()]\nf()",
        open_too=False,
    ),
    _of(
        "crash",
        "ctypes.string_at(0)",
        open_too=False,
        seconds=40.0,
    ),
    # memory
    _attempt("memory bomb", "len(bytearray(1 << 30))"),
    _attempt("shared memory", "mmap.mmap(-1, 1 << 30)"),
    _of(
        "memory by many",
        """
room = mmap.mmap(-1, 4096)
for number in range(6):
    if not os.fork():
        held = b"x" * (100 << 20)
        room[number] = 1
        time.sleep(40)
        os._exit(0)
for _ in range(400):  # pages take long on a loaded machine; six are beyond the limit at once
    time.sleep(0.1)
    if sum(room[:6]) == 6:
        time.sleep(4)  # who looks at it every 20 ms may have to wait for a core
        say("600 MiB")
        os.killpg(0, signal.SIGKILL)
""",
        seconds=40.0,
        memory_mib=256,
    ),
    _attempt("memory of no process", "os.ftruncate(os.memfd_create('m'), 1 << 30)"),
    _of("shared memory of System V", "if libc.shmget(0, 4096, 0o1600) >= 0: say('shmget')"),
    # files
    _attempt("reads a file", "open(facts['file']).read()"),
    _attempt("reads up and down", "open('../' * 40 + facts['file']).read()"),
    _attempt("symlink", "os.symlink(facts['file'], 'link'); open('link').read()"),
    _attempt("symlink to a folder", "os.symlink('/', 'root'); open('root' + facts['file']).read()"),
    _attempt("hard link", "os.link(facts['file'], facts['file'] + '2')"),
    _attempt("lists folders", "os.listdir(facts['folder'])"),
    _attempt("reads passwords", "open('/etc/passwd').read()"),
    _attempt("writes a file", "open(facts['target'], 'w').write('here')"),
    _attempt("writes beside its folder", "open('/here', 'w'); os.unlink('/here')", open_too=False),
    _of(
        "writes to its library",
        "try: open(os.__file__, 'r+'); say('library')\nexcept OSError: pass",
        open_too=False,
    ),
    _of(
        "huge file",
        """
try:
    with open("huge", "wb", 0) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
except OSError:
    pass
if os.path.getsize("huge") > 16 << 20:
    say("huge")
os.unlink("huge")
""",
    ),
    _of(
        "many large files",
        """
held = 0
for number in range(24):
    try:
        with open(f"large{number}", "wb", 0) as file:
            held += file.write(bytes(8 << 20))
    except OSError:
        pass
if held > 80 << 20:
    say("large")
for number in range(24):
    os.unlink(f"large{number}")
""",
    ),
    _attempt("sparse file", "os.truncate(os.open('s', os.O_CREAT | os.O_RDWR), 1 << 34)"),
    _attempt("many files", "[open(f'f{number}', 'w').close() for number in range(3000)]"),
    _attempt("many open files", "held = [open('/dev/null') for _ in range(200)]"),
    _attempt(
        "runs what it wrote",
        "import shutil, subprocess; shutil.copy(sys.executable, 'x'); os.chmod('x', 0o700); "
        "subprocess.run(['./x', '-I', '-S', '-c', ''], check=True)",
    ),
    _attempt("device of a disk", "os.mknod('disk', 0o060600, os.makedev(8, 0))", open_too=False),
    _attempt("terminal", "open('/dev/tty', 'r+')", open_too=False),
    # what it was given
    _of(
        "descriptors",
        """
for number in range(3, 1024):
    try:
        os.fstat(number)
        say(number)
    except OSError:
        pass
""",
    ),
    _of("secrets", "if 'top' in repr(os.environ) or 'SECRET' in os.environ: say(os.environ)"),
    _of(
        "where it runs", "if os.path.exists('/home') or len(os.listdir('.')) > 1: say(os.getcwd())"
    ),
    _attempt("packages", "import pydantic", open_too=False),
    _attempt("grows its input", "os.ftruncate(os.open('/dev/fd/0', os.O_RDWR), 9)", open_too=False),
    _attempt("writes its input", "os.write(0, b'x')", open_too=False),
    # other processes by their files
    _attempt("environment of a process", "open(f\"/proc/{facts['victim']}/environ\", 'rb').read()"),
    _attempt("own process by file", "open('/proc/self/maps').read()"),
    _attempt("root of the first process", "os.listdir('/proc/1/root/')", open_too=False),
    # network
    _attempt("network", "import socket; socket.create_connection(('127.0.0.1', facts['port']), 5)"),
    _attempt(
        "datagrams",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
        ".sendto(b'x', ('127.0.0.1', facts['port']))",
    ),
    _attempt(
        "socket without a file",
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0' + facts['name'])",
    ),
    _of(
        "socket of virtual machines", "if libc.socket(40, 1, 0) >= 0: say('vsock')", open_too=False
    ),
    _of(
        "names",
        "import socket\ntry: say(socket.getaddrinfo('localhost', 80))\nexcept OSError: pass",
    ),
    # the kernel
    _of("namespaces", "if libc.unshare(0x10000000) == 0: say('unshare')", open_too=False),
    _of(
        "namespaces by clone",
        "child = libc.syscall(facts['clone'], 0x10000000 | 17, 0, 0, 0, 0)\n"
        "if child == 0: os._exit(0)\nif child > 0: say('clone')",
        open_too=False,
    ),
    _of(
        "mounts",
        "if libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0: say('mount')",
        open_too=False,
    ),
    _of("rings", "if libc.syscall(425, 8, ctypes.create_string_buffer(200)) >= 0: say('ring')"),
    _of(
        "calls of another architecture",
        "libc.syscall(0x40000000 + 39)\nif os.uname().machine == 'x86_64': say('x32')",
        open_too=False,
    ),
    _attempt("user of all rights", "os.setuid(0)", open_too=False),
    _of(
        "limits",
        """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    soft, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1) if hard > 0 else (soft, hard))
        say(kind)
    except (OSError, ValueError):
        pass
""",
    ),
    # output
    _of("much output", "for _ in range(1 << 12): os.write(1, bytes(1 << 12))"),
    _of(
        "endless output",
        "while True: os.write(1, b'y' * 65536)",
        open_too=False,
        seconds=40.0,
    ),
    _of(
        "drops of output",
        "while True:\n    os.write(1, b'y')\n    time.sleep(0.05)",
        open_too=False,
    ),
)
