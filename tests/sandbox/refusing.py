"""Asks a kernel that refuses to isolate: `python -m tests.sandbox.refusing NUMBER [ARGUMENT]`.

System call NUMBER fails in this process and in all it starts, as under the filter of a container;
its first argument may be given. It prints whether the program ran, and what was said instead.
"""

from __future__ import annotations

import ctypes
import struct
import sys

from sluice.sandbox.programs import SandboxLimits, SandboxUnavailableError, run_program
from tests.patience import PATIENCE


def refuse(number: int, argument: int | None) -> None:
    """Installs the filter, for ever."""

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    lines = [step(0x20, 0, 0, 0), step(0x15, 0, 1 if argument is None else 3, number)]
    if argument is not None:
        lines += [step(0x20, 0, 0, 16), step(0x15, 0, 1, argument)]
    lines += [step(0x06, 0, 0, 0x00050001), step(0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(lines))
    program = struct.pack("=H6xQ", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0


def main() -> None:
    if len(sys.argv) > 1:
        refuse(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    try:
        outcome = run_program(
            {"program.py": "print('ran')"}, ["program.py"], "", SandboxLimits(seconds=PATIENCE)
        )
        print("ran" if b"ran" in outcome.output else outcome)
    except SandboxUnavailableError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
