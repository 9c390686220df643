"""What a slow import and the test that waits for it tell each other."""

from __future__ import annotations

import threading

begun = threading.Event()
may_end = threading.Event()
