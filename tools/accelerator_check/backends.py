"""Training backends of one rank, and the rows they train on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import Mesh, Row, TrainingBackend, create_backend
from services.trainer.config import OptimConfig, TrainerConfig
from sluice import platform
from sluice.config import parse_config


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """A process group of this process alone, over the device's own collectives."""
    # a former group's file is removed when nothing holds its store any more, whenever that is
    meeting = Path(tempfile.mkdtemp(dir=directory)) / "group"
    dist.init_process_group(
        platform.current().collective, init_method=f"file://{meeting}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def backend_of(
    name: str,
    model: Path,
    store: Path,
    *,
    half: bool,
    optim: OptimConfig,
    adapters: bool = False,
    operations: Mapping[str, str] | None = None,
) -> Iterator[TrainingBackend]:
    """A backend in float32, or with `half` as it trains in bfloat16; inside `alone`.

    adapters: it trains those, and not the model. operations: that are asked for.
    """
    values: dict[str, Any] = {
        "model": str(model),
        "store": store,
        "backend": name,
        "optim": optim,
        "durable": False,
    }
    if operations is not None:
        values["operations"] = dict(operations)
    if adapters:
        values["lora"] = {"rank": 8}
    if name in ("megatron", "fsdp"):
        values[name] = {"dtype": "bfloat16" if half else "float32"}
    else:
        values["autocast"] = half
    mesh = Mesh(rank=0, world_size=1)
    backend = create_backend(name, parse_config(TrainerConfig, values), mesh)
    try:
        yield backend
    finally:
        backend.close()


def even_rows(vocabulary: int, count: int, prompt: int, response: int) -> list[Row]:
    """Rows of one length, each a prompt of its own."""
    generator = torch.Generator().manual_seed(1)
    return [
        _row(f"{index}", vocabulary, prompt, response, generator, None) for index in range(count)
    ]


def ragged_rows(vocabulary: int, groups: int, longest: int) -> list[Row]:
    """Groups of four samples, whose prompt they share, of many lengths up to `longest`."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for group in range(groups):
        shared = torch.randint(vocabulary, (3 + 7 * group,), generator=generator)
        for index in range(4):
            length = 1 + int(torch.randint(longest, (1,), generator=generator))
            rows.append(
                _row(f"{group}/{index}", vocabulary, len(shared), length, generator, shared)
            )
    return rows


def _row(
    name: str,
    vocabulary: int,
    prompt: int,
    response: int,
    generator: torch.Generator,
    shared: torch.Tensor | None,
) -> Row:
    tokens = torch.randint(vocabulary, (prompt + response,), generator=generator)
    if shared is not None:
        tokens[:prompt] = shared
    near = -float(torch.tensor(float(vocabulary)).log())  # an even guess: few are clipped
    noise = torch.randn((2, response), generator=generator)
    return Row(
        sample_id=name,
        group_id=name.split("/")[0],
        token_ids=tokens,
        prompt_length=prompt,
        loss_mask=torch.ones(response, dtype=torch.bool),
        columns={"advantages": noise[0], "rollout_logprobs": near + 0.1 * noise[1]},
    )


def joined(values: dict[str, torch.Tensor], rows: Sequence[Row]) -> torch.Tensor:
    """Columns of all rows, one behind the other."""
    return torch.cat([values[row.sample_id] for row in rows])
