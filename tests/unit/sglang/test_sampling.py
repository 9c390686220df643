"""What SGLang is told of how to draw."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from services.rollout.engine.interface import Generation, Sampling
from services.rollout.engine.sglang.samples import sampling_parameters

SAMPLING = Sampling(
    max_new_tokens=9,
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    stop_token_ids=(3, 4),
    seeds=(11, 12),
)


def told(sampling: Sampling, index: int = 0, *, is_seeded: bool = True) -> dict[str, Any]:
    generation = Generation(
        request_id="r", prompt_token_ids=(1,), sampling=sampling, sample_count=2
    )
    return sampling_parameters(generation, index, 5, is_seeded=is_seeded)


def test_every_parameter_reaches_it() -> None:
    found = told(SAMPLING, 1)
    assert found.pop("stream_interval") > 1
    assert found == {
        "max_new_tokens": 5,  # what there is room for
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "stop_token_ids": [3, 4],
        "ignore_eos": False,
        "sampling_seed": 12,
        "no_stop_trim": True,
    }
    names = {field.name for field in fields(Sampling)}
    # stop strings are found in what it sends; of its least tokens log-probs would be others
    own = {"seeds", "stop", "min_new_tokens"}
    assert names == found.keys() - {"sampling_seed", "no_stop_trim"} | own
    assert told(replace(SAMPLING, stop=("a",))).keys() == told(SAMPLING).keys()
    intervals = [told(replace(SAMPLING, stop=each))["stream_interval"] for each in (("a",), ())]
    assert intervals[0] < intervals[1], "what is drawn behind a stop string is for nothing"
    assert told(Sampling(max_new_tokens=5))["top_k"] == -1, "off"
    least = told(Sampling(max_new_tokens=5, top_p=5e-324))["top_p"]
    assert 0 < least < 1 / 1_000_000 and least == np.float32(least), "not 0 as a float32"


def test_a_token_that_stands_for_an_image_ends_a_sample() -> None:
    generation = Generation(request_id="r", prompt_token_ids=(1,), sampling=SAMPLING)
    found = sampling_parameters(generation, 0, 5, is_seeded=False, unsampled=(7, 8))
    assert found["stop_token_ids"] == [3, 4, 7, 8]


def test_without_a_seed_no_two_samples_are_told_to_draw_alike() -> None:
    """A deterministic server would take the same one for all."""
    unseeded = Sampling(max_new_tokens=5)
    seeds = [told(unseeded, index)["sampling_seed"] for index in (0, 1) for _ in range(8)]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert "sampling_seed" not in told(SAMPLING, is_seeded=False), "it would refuse"
