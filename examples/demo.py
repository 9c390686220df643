"""`python -m examples.demo`: `sluice demo`, for who works in this directory."""

from __future__ import annotations

import sys

from sluice.demo.command import main
from sluice.demo.copy_digits import DIGITS, START_SECONDS, write_prompts

__all__ = ["DIGITS", "START_SECONDS", "main", "write_prompts"]

if __name__ == "__main__":
    sys.exit(main())
