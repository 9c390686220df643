"""What may go wrong on a rank and is told the front, in place of a process that just ends."""

from __future__ import annotations

from safetensors import SafetensorError

from sluice.runtime.errors import ServiceError
from sluice.weights.errors import WeightStoreError

# Of models and their providers, of libraries (absent ones too), files and stores of weights.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    ServiceError,
    TypeError,
    ValueError,
    WeightStoreError,
)
