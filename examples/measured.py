"""What the demos of this directory cost: as `sluice demo` measures itself."""

from __future__ import annotations

from sluice.demo.measured import Cost, empty_directory, held_out_score, measured_run

__all__ = ["Cost", "empty_directory", "held_out_score", "measured_run"]
