"""`python -m examples.models.tiny_qwen3 DIRECTORY [SEED]`: the model of `sluice demo`."""

from __future__ import annotations

from sluice.demo.tiny_qwen3 import DIGITS, END, EQUALS, PAD, build_tiny_qwen3, main

__all__ = ["DIGITS", "END", "EQUALS", "PAD", "build_tiny_qwen3", "main"]

if __name__ == "__main__":
    main()
