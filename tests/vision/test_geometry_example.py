"""The files of the geometry example train, as they are but for shorter runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.models.tiny_qwen3_vl import IMAGE, WORDS, build_tiny_qwen3_vl
from sluice.loop.ledger import Ledger
from sluice.loop.report import read_metrics
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "geometry" / "cpu"
SHORT = {"steps": 2, "groups_per_step": 4, "samples_per_group": 8, "evaluation": "null"}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_it_trains_on_turns_with_pictures(algorithm: str, tmp_path: Path) -> None:
    build_tiny_qwen3_vl(tmp_path / "runs" / "geometry" / "model")
    command = [sys.executable, "-m", "sluice.cli", "train", str(EXAMPLE / f"{algorithm}.yaml")]
    command += ["--up", str(EXAMPLE / f"{algorithm}_services.yaml")]
    command += [part for name, value in SHORT.items() for part in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    directory = tmp_path / "runs" / f"geometry-{algorithm}"
    rows = [row for row in read_metrics(directory / "run") if "reward_mean" in row]
    ledger, blobs = Ledger(directory / "run" / "ledger.sqlite"), BlobStore(directory / "store")
    groups = ledger.groups("consumed")
    ledger.close()
    turned = 0
    for row in rows:
        taken = [group for group in groups if group.consumed_step == row["step"]]
        samples = [sample for group in taken for sample in decode_group(blobs.get(group.blob))]
        turned += sum(map(check_turns, samples))
        tokens = [int(mask_of(sample).sum()) for sample in samples]
        rewards = [float(sample.columns["reward"]) for sample in samples]
        assert (len(samples), sum(tokens)) == (32, row["tokens"])
        assert row["reward_mean"] == pytest.approx(np.mean(rewards))
        assert row["rollout_mismatch"] < 1e-5, "the trainer sees what the engine saw"
        if algorithm == "ppo":  # of a new head, undiscounted: every trained token gets the reward
            expected = np.average(rewards, weights=tokens)
            assert row["critic_return"] == pytest.approx(expected)
    assert [row["step"] for row in rows] == [1, 2]
    assert turned, "no sample has a second turn"
    assert rows[-1]["reward_mean"] and rows[-1]["grad_norm"] > 0
    assert (rows[-1].get("critic_grad_norm", 0) > 0) == (algorithm == "ppo")


def mask_of(sample: Sample) -> np.ndarray:
    """Absent where all of a response is the policy's."""
    return np.asarray(sample.columns.get("loss_mask", np.ones(sample.response_length, np.bool_)))


def check_turns(sample: Sample) -> bool:
    """Whether a sample has a second turn; its picture is there, and not trained on."""
    if len(sample.media) < 2:
        return False
    shown = sample.media[1]
    mask = mask_of(sample)
    seen = slice(shown.first_token - sample.prompt_length, shown.end - sample.prompt_length)
    assert not mask[seen].any() and mask[0] and mask[-1]
    assert set(sample.token_ids[shown.first_token : shown.end]) == {WORDS.index(IMAGE)}
    return True
