"""Becomes the given command, in a process that dies with the one that started it.

`python launch.py <pid of the parent> command...`. It runs under SGLang's interpreter, which has
none of this package, so it stands alone. The order to die outlives `exec`; SGLang's own children
die with their parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the order was given
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
