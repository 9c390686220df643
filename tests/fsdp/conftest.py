from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.training_backend.cases import Model, build_model
from tests.fast_part import keep_fast_part
from tests.fsdp.oracle import Expected, expect
from tests.rank_pool import Pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole suite runs where it is asked for by name; elsewhere its fast part does."""
    keep_fast_part(Path(__file__).parent, config, items)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool("tests.fsdp.jobs")
    yield pool
    pool.close()


class ExpectedByModel:
    """Checkpoints of the contract's families, and what the oracle makes of each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Model, Expected]] = {}

    def __call__(self, family: str, **settings: Any) -> tuple[Model, Expected]:
        name = "-".join([family, *(f"{key}-{value}" for key, value in sorted(settings.items()))])
        if name not in self._made:
            model = build_model(self._root / name, family, **settings)
            self._made[name] = model, expect(model)
        return self._made[name]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ExpectedByModel:
    return ExpectedByModel(tmp_path_factory.mktemp("checkpoints"))
