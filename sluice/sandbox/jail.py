"""Confines one program, then is it: run as a script, `python -I -S jail.py PARENT STATUS_FD < job`.

It imports the standard library alone. Three processes: a keeper in the caller's namespaces, the
first process of the program's namespaces, and the program. The first one is killed with the keeper,
the keeper with its PARENT, and the kernel ends all of a namespace with its first process. It tells
by JSON lines at STATUS_FD, which the program never holds: `started`, then `exit` or `memory`, or
`failed` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PRIVATE = "/tmp"  # of the program, gone with it
MAX_FILES = 1024  # names in the private directory
MAX_OPEN_FILES = 64
MIB = 1024 * 1024
WATCH_SECONDS = 0.02  # between two looks at the memory of all processes
NOBODY = 65534  # who the program of a root is, outside
PROGRAM_ID = 1  # who it is inside

_NEW_USER = 0x10000000
# mounts, cgroup, UTS, IPC, processes, network
_NEW_SPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 2, 4, 8, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_FILTER = 2
_EPERM, _ENOSYS = 1, 38

# x86_64, aarch64. What opens the kernel's less trodden ways, names other processes, or takes memory
# that no limit of a process counts. `socket` too: vsock, say, has no namespace.
_DENIED = {
    **{"socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270)},
    **{"process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425)},
    **{"keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194)},
    **{"msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "syslog": (103, 116)},
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142)},
    **{"swapon": (167, 224), "acct": (163, 89), "quotactl": (179, 60), "personality": (135, 92)},
    **{"fanotify_init": (300, 262), "modify_ldt": (154, 1 << 29), "quotactl_fd": (443, 443)},
}
_CLONE, _CLONE3 = (56, 220), 435
_LAST_CALL = 462  # of those looked at (Linux 6.8); later ones may do anything
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The kernel refused a part of the isolation."""


_FAILURES = (OSError, ValueError, SetupError)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main() -> None:
    parent, status = int(sys.argv[1]), int(sys.argv[2])
    os.closerange(3, status)
    os.closerange(status + 1, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], status + 1))
    os.set_inheritable(status, False)  # exec closes it
    try:
        job = json.loads(os.fdopen(0, "rb", closefd=False).read())
        processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # gone from sight soon
        _enter(parent)
        alive, held = os.pipe()
        first = os.fork()
        if not first:
            os.close(held)
            _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if select.select([alive], [], [], 0)[0]:  # the keeper is gone
                os._exit(1)
            _be_first(job, status)
        os.close(1)
        _watch(first, processes, job["limits"]["memory_mib"] * MIB, status)
    except _FAILURES as error:  # the first process ends with this one
        _fail(status, error)
    os._exit(0)


def _watch(first: int, processes: int, room: int, status: int) -> None:
    """Waits for the end of all, and makes it where they hold more memory than `room` together."""
    ended = select.poll()
    ended.register(os.pidfd_open(first), select.POLLIN)
    while not ended.poll(WATCH_SECONDS * 1000):
        try:
            held = sum(_resident(one, processes) for one in _descendants(first, processes))
        except OSError as error:
            if ended.poll(0):
                break
            _tell(status, failed=f"the memory of processes cannot be read: {error}")
            held = room + 1
        if held > room:
            _tell(status, memory=True)
            os.kill(first, signal.SIGKILL)
            break
    os.waitpid(first, 0)


def _descendants(process: int, processes: int) -> list[int]:
    """Raises OSError unless the first one can be asked."""
    found = _children(process, processes)
    for child in found:
        with contextlib.suppress(OSError):  # it has ended
            found += _children(child, processes)
    return found


def _children(process: int, processes: int) -> list[int]:
    found: list[int] = []
    threads = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=processes)
    try:
        for thread in os.listdir(threads):
            with open(os.open(f"{thread}/children", os.O_RDONLY, dir_fd=threads), "rb") as file:
                found += map(int, file.read().split())
    finally:
        os.close(threads)
    return found


def _resident(process: int, processes: int) -> int:
    """Returns the bytes of a process that are in no file of a disk, 0 when it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(os.open(f"{process}/status", os.O_RDONLY, dir_fd=processes), "rb") as file:
            words = [line.split() for line in file if line.startswith((b"RssAnon:", b"RssShmem:"))]
        return sum(int(count) * 1024 for _, count, _ in words)
    return 0


def _fail(status: int, error: BaseException) -> NoReturn:
    _tell(status, failed=f"{type(error).__name__}: {error}")
    os._exit(1)


def _tell(status: int, **values: Any) -> None:
    os.write(status, json.dumps(values).encode() + b"\n")


def _enter(parent: int) -> None:
    """Makes the namespaces; the next child is the first process in them."""
    if platform.machine() not in _MACHINES:
        raise SetupError(f"no filter of system calls is known for {platform.machine()}")
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise SetupError("/proc does not list the children of processes")
    user, group, own = os.geteuid(), os.getegid(), os.getpid()
    ready, begin = os.pipe()
    mapper = os.fork()  # who maps several users must be outside of the new namespace
    if not mapper:
        os.close(begin)
        go = os.read(ready, 1)
        os._exit(_map_users(own, user, group) if go else 1)
    _call("unshare(CLONE_NEWUSER)", _libc.unshare(_NEW_USER))
    os.write(begin, b"1")
    if os.waitpid(mapper, 0)[1]:
        raise SetupError("the users of a new namespace cannot be mapped")
    _call("unshare(mounts, processes, network, ...)", _libc.unshare(_NEW_SPACES))
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
    if os.getppid() != parent:
        os._exit(1)


def _map_users(target: int, user: int, group: int) -> int:
    """A root keeps root's rights to set up, and has the program run as nobody, who is counted."""
    try:
        users, groups = f"{PROGRAM_ID} {user} 1\n", f"{PROGRAM_ID} {group} 1\n"
        if user == 0:
            users = groups = f"0 0 1\n{PROGRAM_ID} {NOBODY} 1\n"
        else:
            _write(target, "setgroups", "deny")
        _write(target, "uid_map", users)
        _write(target, "gid_map", groups)
    except OSError:
        return 1
    return 0


def _write(process: int, name: str, text: str) -> None:
    file = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
    os.write(file, text.encode())
    os.close(file)


def _be_first(job: Mapping[str, Any], status: int) -> NoReturn:
    """Builds what the program sees, starts it, reaps whatever ends, and ends with it."""
    try:
        os.setsid()  # a signal to its process group must not reach the keeper's
        _set(_PR_SET_DUMPABLE, 0)
        _build_root(job)
        given = _input(job["input"].encode("utf-8", "surrogatepass"))
        told, tell = os.pipe()
        program = os.fork()
        if not program:
            try:
                os.dup2(given, 0)
                _become(job)
            except _FAILURES as error:
                os.write(tell, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        os.close(tell)
        os.close(1)
        if failed := os.read(told, 4096):  # nothing: the pipe was closed by its exec
            raise SetupError(failed.decode())
        _tell(status, started=True)
        while True:
            ended, code = os.waitpid(-1, 0)
            if ended == program:
                _tell(status, exit=os.waitstatus_to_exitcode(code))
                os._exit(0)
    except _FAILURES as error:
        _fail(status, error)


def _build_root(job: Mapping[str, Any]) -> None:
    """Leaves a read-only view of the interpreter and its libraries, and a private directory."""
    sources = {path: os.open(path, os.O_PATH) for path in job["visible"]}
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    new = "/tmp"  # any directory; covered in this namespace alone
    _mount("tmpfs", new, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    inside = new + PRIVATE
    os.mkdir(inside)
    files = {name: text.encode("utf-8", "surrogatepass") for name, text in job["files"].items()}
    room = job["limits"]["disk_mib"] * MIB + sum(len(data) + 4096 for data in files.values())
    size = f"size={room},nr_inodes={MAX_FILES},mode=777"
    _mount("tmpfs", inside, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, size)
    for path, source in sources.items():
        _show(source, path, new, job["hidden"])
        os.close(source)
    for name, data in files.items():
        with open(f"{inside}/{name}", "wb") as file:
            file.write(data)
    os.chdir(new)
    _call("pivot_root", _libc.syscall(155 if _machine() == 0 else 41, b".", b"."))
    _call("umount", _libc.umount2(b".", _DETACH))
    _set_mount("/", _ATTR_READ_ONLY, is_whole=False)
    os.chdir(PRIVATE)


def _show(source: int, path: str, root: str, hidden: Sequence[str]) -> None:
    target = root + path
    folder = target if os.path.isdir(f"/proc/self/fd/{source}") else os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    if folder != target:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(f"/proc/self/fd/{source}", target, None, _MS_BIND | _MS_REC)
    is_device = path.startswith("/dev/")
    _set_mount(target, _ATTR_READ_ONLY | _ATTR_NOSUID | (0 if is_device else _ATTR_NODEV))
    for name in hidden:
        if os.path.isdir(f"{target}/{name}"):
            _mount("tmpfs", f"{target}/{name}", "tmpfs", _MS_NOSUID, "size=4k,nr_inodes=1")


def _set_mount(path: str, attributes: int, is_whole: bool = True) -> None:
    values = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if is_whole else 0
    done = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, values, ctypes.c_size_t(len(values))
    )
    _call(f"mount_setattr({path})", done)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data) if data else None)
    _call(f"mount({target})", done)


def _input(data: bytes) -> int:
    """A file that nobody can write, so that a program cannot grow it."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, 1 | 2 | 4 | 8)  # seal, shrink, grow, write
    return file


def _become(job: Mapping[str, Any]) -> NoReturn:
    limits, is_root = job["limits"], os.geteuid() == 0
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 2)
    if is_root:
        os.setgroups([])
        os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
        os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    bounds = {
        resource.RLIMIT_AS: limits["memory_mib"] * MIB,
        resource.RLIMIT_FSIZE: limits["file_mib"] * MIB,
        # The keeper and the first process are the same user, unless that is root.
        resource.RLIMIT_NPROC: limits["processes"] + (0 if is_root else 2),
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # 0 forbids no dump that goes to a program
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for bound, value in bounds.items():
        hard = resource.getrlimit(bound)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(bound, (value, value))
    room = limits["cpu_seconds"]  # a signal that tells of it, then one that cannot be ignored
    resource.setrlimit(resource.RLIMIT_CPU, (room, room + 1))
    _set(_PR_SET_NO_NEW_PRIVS, 1)
    code = _filter()
    _set(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(_Filter(len(code) // 8, code)))
    environment = {"HOME": PRIVATE, "TMPDIR": PRIVATE, "LANG": "C.UTF-8"}
    os.execve(job["command"][0], job["command"], environment)


def _filter() -> bytes:
    """A program of the kernel's packet filter: number and architecture in, allowed or not out."""
    column, architecture = _machine(), _MACHINES[platform.machine()][1]
    kill, allow = 0x80000000, 0x7FFF0000
    load, equal, above, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    lines = [
        step(load, 0, 0, 4),  # architecture
        step(equal, 1, 0, architecture),
        step(give, 0, 0, kill),
        step(load, 0, 0, 0),  # number
        step(above, 0, 1, 0x40000000),  # the numbers of x32
        step(give, 0, 0, kill),
        step(above, 0, 1, _LAST_CALL + 1),
        step(give, 0, 0, 0x00050000 | _ENOSYS),
    ]
    for numbers in _DENIED.values():
        lines += [step(equal, 0, 1, numbers[column]), step(give, 0, 0, 0x00050000 | _EPERM)]
    lines += [step(equal, 0, 1, _CLONE3), step(give, 0, 0, 0x00050000 | _ENOSYS)]  # flags in memory
    lines += [
        step(equal, 0, 3, _CLONE[column]),
        step(load, 0, 0, 16),  # its flags
        step(any_of, 0, 1, _NEW_USER | _NEW_SPACES),
        step(give, 0, 0, 0x00050000 | _EPERM),
        step(give, 0, 0, allow),
    ]
    return b"".join(lines)


def _machine() -> int:
    return _MACHINES[platform.machine()][0]


def _set(option: int, *values: Any) -> None:
    _call(f"prctl({option})", _libc.prctl(option, *values, *[0] * (4 - len(values))))


def _call(name: str, result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise SetupError(f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
