"""One rank of a trainer. What may go wrong on it is told the controller, in place of an end."""

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
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    ServiceError,
    TypeError,
    ValueError,
    WeightStoreError,
)
