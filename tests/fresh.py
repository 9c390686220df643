"""Processes of `multiprocessing` that begin without the threads and locks of who starts them."""

from __future__ import annotations

import multiprocessing

# forks of one that has imported, where each that is spawned would: a second of processor time
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    ["pytest", "safetensors.torch", "sluice.weights.host_cache", "sluice.weights.transfer.group"]
)
