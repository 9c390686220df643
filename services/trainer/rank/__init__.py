"""One rank of a trainer. What may go wrong on it is told the controller, in place of an end."""

from __future__ import annotations

from safetensors import SafetensorError

from sluice.runtime.errors import ServiceError
from sluice.weights.errors import WeightStoreError

SPEAKING = {"services", "sluice", "transformers"}  # whose ValueErrors are words for people
# Of models and their providers, of libraries (absent ones too), files and stores of weights.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    ServiceError,
    TypeError,
    ValueError,
    WeightStoreError,
)


def is_refusal(error: Exception) -> bool:
    """Whether somebody said that what was asked for cannot be, and a trace has nothing to add."""
    if isinstance(error, (OSError, ServiceError, WeightStoreError)):
        return True
    raised_at = error.__traceback__
    while raised_at is not None and raised_at.tb_next is not None:
        raised_at = raised_at.tb_next
    module = "" if raised_at is None else raised_at.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and module.partition(".")[0] in SPEAKING
