"""Checks that need processes: run as one of four gloo ranks, answers go to a JSON file.

    python -m tests.unit.algo.ranks.run <rank> <rendezvous file> <result file>

Every rank runs every check in the same order, so four processes are started once for all. Parity
checks split the four ranks into context groups of 1, 2 or 4 that do the same work.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from sluice.algo.collectives import Collectives, create_collectives
from tests.patience import PATIENCE
from tests.unit.algo.ranks import parity, sequence

WORLD = 4
TIMEOUT = timedelta(seconds=PATIENCE)


@dataclass(frozen=True)
class Context:
    world: Collectives
    groups: tuple[Collectives, ...]  # this rank's context groups of 1, 2 and 4


def create_context(rank):
    """Groups with monitors: every parity check is also a check of the collective sequence."""
    groups = []
    for size in (1, 2, WORLD):
        blocks = [list(range(first, first + size)) for first in range(0, WORLD, size)]
        for block in blocks:
            group = dist.new_group(block, timeout=TIMEOUT)
            if rank in block:
                groups.append(create_collectives(group, TIMEOUT))
    return Context(Collectives(dist.group.WORLD), tuple(groups))


def find_checks():
    for module in (parity, sequence):
        for name, function in vars(module).items():
            if name.startswith("check_"):
                yield name.removeprefix("check_"), function


def main():
    rank, rendezvous, result = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    context = create_context(rank)
    answers = {}
    for name, function in find_checks():
        try:
            function(context)
            answers[name] = ""
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError):
            answers[name] = traceback.format_exc()
        result.write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
