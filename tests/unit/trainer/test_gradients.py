"""The ledger of parts."""

from __future__ import annotations

import pytest

from services.trainer.controller.state import GradientLedger, PassRecord
from services.trainer.errors import (
    AggregationMismatchError,
    GradientsIncompleteError,
    NoGradientsError,
    PartReusedError,
    PartsMismatchError,
)

TOKEN_MEAN = ("token_mean", None)


def ledger_with(*part_ids: str) -> GradientLedger[str]:
    ledger: GradientLedger[str] = GradientLedger()
    for part_id in part_ids:
        ledger.parts[part_id] = PassRecord("body", f"answer of {part_id}", TOKEN_MEAN, 10.0)
    return ledger


def test_a_repeated_part_gets_the_first_answer() -> None:
    ledger = ledger_with("a")
    assert ledger.find("a", "body") == "answer of a"
    assert ledger.find("b", "body") is None
    with pytest.raises(PartReusedError) as caught:
        ledger.find("a", "other body")
    assert caught.value.metadata == {"part_id": "a"}


@pytest.mark.parametrize("expected", [["a"], ["a", "b", "c"], ["a", "a", "b"], ["b", "c"], []])
def test_another_set_of_parts_is_refused(expected: list[str]) -> None:
    with pytest.raises(PartsMismatchError) as caught:
        ledger_with("a", "b").check_expected(expected)
    assert caught.value.metadata == {"expected": ",".join(expected), "gathered": "a,b"}


def test_exactly_the_gathered_parts_are_accepted_in_any_order() -> None:
    ledger = ledger_with("a", "b")
    ledger.check_expected(["b", "a"])
    assert ledger.normalizer == 20.0
    assert ledger.clear() == ["a", "b"]
    with pytest.raises(NoGradientsError):
        ledger.check_expected(["a", "b"])


def test_one_aggregation_a_step() -> None:
    ledger = ledger_with("a")
    ledger.check_aggregation(TOKEN_MEAN)
    for other in (("sample_mean", None), ("constant", 8.0)):
        with pytest.raises(AggregationMismatchError):
            ledger.check_aggregation(other)
    ledger.clear()
    ledger.check_aggregation(("constant", 8.0))


def test_broken_gradients_serve_nothing_until_they_are_cleared() -> None:
    ledger = ledger_with("a")
    ledger.broken = "rank 1 was killed"
    for call in (lambda: ledger.find("a", "body"), lambda: ledger.check_expected(["a"])):
        with pytest.raises(GradientsIncompleteError, match="rank 1 was killed"):
            call()
    ledger.clear()
    assert ledger.find("a", "body") is None
