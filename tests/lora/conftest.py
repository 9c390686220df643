from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.training_backend.cases import build_model
from tests.fast_part import keep_fast_part
from tests.lora.oracle import ExpectedAdapter, expect
from tests.models.families import CASES, RECURRENT_TYPES, build
from tests.rank_pool import Pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole suite runs where it is asked for by name; elsewhere its fast part does."""
    keep_fast_part(Path(__file__).parent, config, items)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool("tests.lora.jobs")
    yield pool
    pool.close()


HYBRIDS = {case.name: case for case in CASES if case.known in RECURRENT_TYPES}
VARIANTS = {"one_key_head": ("qwen3", {"num_key_value_heads": 1})}  # which tensor ranks share


class ExpectedAdapters:
    """Checkpoints of the contract's families, and what the oracle makes of their adapters."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, ExpectedAdapter] = {}

    def __call__(self, family: str) -> ExpectedAdapter:
        if family not in self._made:
            kind, settings = VARIANTS.get(family, (family, {}))
            directory = self._root / family / "model"
            if hybrid := HYBRIDS.get(family):
                model = build(hybrid, directory)
            else:
                model = build_model(directory, kind, **settings)
            self._made[family] = expect(model, family, self._root / family)
        return self._made[family]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ExpectedAdapters:
    return ExpectedAdapters(tmp_path_factory.mktemp("checkpoints"))
