"""`python -m tests.program CODE ARGUMENT...` is `python -c CODE ARGUMENT...`, and may begin warm.

For what a process does. What it imports is seen of a `python -c`, which begins with nothing.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    code = sys.argv[1]
    sys.argv[:2] = ["-c"]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
