"""How long a test waits for what has to happen: a limit that only a hang reaches.

Minutes, however fast a thing is on a quiet machine: a run beside forty other processes is slow
and not wrong. pytest's own limit (pyproject.toml) is a few of these.
"""

from __future__ import annotations

PATIENCE = 600.0  # seconds
