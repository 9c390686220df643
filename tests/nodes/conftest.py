"""All of it runs by `make test-nodes`; `make test` runs what is marked `fast`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast_part import keep_fast_part

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_fast_part(HERE, config, items)
