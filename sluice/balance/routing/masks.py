"""Whether a mask holds everywhere or anywhere; several times cheaper than ndarray.all and any,
which matters for batches of a handful."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def all_of(mask: NDArray[np.bool_]) -> bool:
    return int(np.count_nonzero(mask)) == len(mask)


def any_of(mask: NDArray[np.bool_]) -> bool:
    return int(np.count_nonzero(mask)) > 0
