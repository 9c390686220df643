"""Writes figures as a data set on a disk, in the form of Geometry3K: images, problem, answer.

`python -m examples.geometry.data_set DIRECTORY [COUNT]` leaves `train.jsonl`, whose rows name files
below `images/`, and `train.parquet`, whose rows hold them. Rows of either form are read by the
environment `prompts` (`geometry3k.yaml` beside this file), and so is Geometry3K itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.geometry.figures import draw_figure, png
from examples.geometry.single_turn import HOW
from sluice.samples.messages import MARK


def write_data_set(directory: Path, count: int, *, seed: int = 0, difficulty: int = 1) -> None:
    """Write `count` figures, the same for a seed. Answers have nine digits at most."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    rows, held = [], []
    for index in range(count):
        figure = draw_figure(seed, index, difficulty)
        name = f"images/{index:06}.png"
        data = png(figure.picture)
        (directory / name).write_bytes(data)
        problem = f"{MARK}{figure.question} {HOW}"
        row = {"images": [name], "problem": problem, "answer": f"{figure.answer:.9g}"}
        rows.append(row)
        held.append({**row, "images": [{"bytes": data, "path": name}]})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text(lines)
    pq.write_table(pa.Table.from_pylist(held), directory / "train.parquet")


if __name__ == "__main__":
    write_data_set(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
