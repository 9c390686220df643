"""Sluice. gRPC is told, before anything imports it, to leave processes that are started alone.

Its handlers of `fork` run in the new process, before the program: they may wait there for ever for
threads that are not in it, and the event loop with them, which waits for the program. Calls that
are under way they may break. A program of one's own that forks, and goes on with gRPC, asks for
them by the variable.

Of what it logs by itself there are errors only, unless a variable asks for more: that a connection
has gone is told by whoever misses it, in words for people.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
