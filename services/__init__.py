"""The services. Their processes do next to no linear algebra in numpy, and need no threads for it.

numpy's OpenBLAS starts one a core as it is imported, and each spins for a tenth of a second.
"""

import os

import sluice as sluice  # before anything imports gRPC

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
