"""Stop strings in SGLang's messages: what it drew behind one is left out. They are played back."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.engine.interface import Delta, FinishReason
from services.rollout.engine.sglang.samples import PendingSample
from services.rollout.errors import EngineFailedError
from sluice.samples.stops import StopSearch
from tests.unit.sglang.test_experts import ROUTING, packed, table

ABORT, LENGTH, STOP = ({"type": kind} for kind in ("abort", "length", "stop"))


def sample_with(*stops: str, follows: bool = True, **settings: Any) -> PendingSample:
    """Tokens are the characters of a text."""
    search = StopSearch(chr, stops) if stops else None
    kind = {"index": 0, "rid": "r", "follows": follows, "temperature": 1.0, "arrived": 0.0}
    return PendingSample(search=search, **kind, **settings)


def message(text: str, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    ids = [ord(character) for character in text]
    own = {
        "output_token_logprobs": [[-place / 8, token, None] for place, token in enumerate(ids)],
        "prompt_tokens": 3,
        "finish_reason": reason,
        "weight_version": "1:ab",
    }
    return {"output_ids": ids, "meta_info": own | meta}


def take(
    sample: PendingSample, *messages: dict[str, Any], is_delta: bool = True
) -> list[Delta | None]:
    deltas = []
    for one in messages:
        sample.take(one, (0, "ab"), is_delta=is_delta)
        deltas.append(sample.delta())
    return deltas


def text_of(deltas: list[Delta | None]) -> list[str]:
    return ["".join(map(chr, delta.token_ids)) for delta in deltas if delta is not None]


@pytest.mark.parametrize("reason", [ABORT, LENGTH, STOP], ids=lambda reason: str(reason["type"]))
def test_what_comes_behind_a_stop_string_is_no_part_of_the_sample(reason: dict[str, Any]) -> None:
    versions = [
        {"version": "1:ab", "start": 0, "end": 4},
        {"version": "2:cd", "start": 4, "end": 12},
    ]
    final = message("mn", reason, completion_tokens=12, weight_versions=versions)
    sample = sample_with("</s>", "</st", follows=False)
    _, _, last = deltas = take(sample, message("a</"), message("s>xyzkl"), final)
    assert text_of(deltas) == ["a</s>"]
    assert last is not None
    assert last.finish_reason is FinishReason.STOP
    assert last.logprobs == (0, -1 / 8, -2 / 8, 0, -1 / 8)
    spans = [(span.version, span.first_token, span.last_token) for span in last.spans]
    assert spans == [(1, 0, 3), (2, 4, 4)]


def test_a_listener_gets_the_end_of_a_stop_string_with_the_reason() -> None:
    """Were the server lost in between, the sample would go on behind its stop string."""
    messages = message("a</"), message("s>x"), message("y", ABORT)
    deltas = take(sample_with("</s>"), *messages)
    assert [delta and delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert deltas[1] is None
    assert text_of(deltas) == ["a</", "s>"]


def test_messages_may_bring_all_that_was_drawn_so_far() -> None:
    texts = message("a</s"), message("a</s>xy"), message("a</s>xyz", LENGTH, completion_tokens=8)
    assert text_of(take(sample_with("</s>"), *texts, is_delta=False)) == ["a</s", ">"]
    assert text_of(take(sample_with(), *texts, is_delta=False)) == ["a</s", ">xy", "z"]


def test_what_was_drawn_is_counted_with_what_is_left_out() -> None:
    sample = sample_with("b")
    assert sample.take(message("abcd"), (0, "ab"), is_delta=True) == 4
    assert sample.take(message("ef"), (0, "ab"), is_delta=True) == 2
    with pytest.raises(EngineFailedError, match="drew 7, sent 6"):
        sample.take(message("", LENGTH, completion_tokens=7), (0, "ab"), is_delta=True)


def test_experts_are_those_of_the_sample() -> None:
    sent = table(3 + 6 - 1)
    final = message("ef", ABORT, routed_experts=packed(sent))
    sample = sample_with("c", routing=ROUTING)
    *_, last = take(sample, message("abcd"), final)
    assert last is not None and last.routed_experts is not None
    assert last.routed_experts.tolist() == sent[: 3 + 3 - 1, list(ROUTING.mixtures)].tolist()
    *_, lost = take(sample_with("c", routing=ROUTING), message("abcd"), message("", ABORT))
    assert lost is not None and lost.routed_experts is None
    assert lost.finish_reason is FinishReason.STOP
