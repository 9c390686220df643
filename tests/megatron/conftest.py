from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.trainer.backends.megatron import upstream
from tests.fast_part import keep_fast_part
from tests.megatron.comparison import Summary, Tensors
from tests.megatron.models import build_checkpoint, make_rows
from tests.megatron.oracle import Oracle, OracleStep, reference_config
from tests.megatron.settings import NORMALIZER, OPTIM, SPEC, STEPS
from tests.rank_pool import Pool

upstream.load()  # before a file of tests imports it: then it can be adapted no more
SUMMARY = Summary()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The whole suite runs where it is asked for by name; elsewhere its fast part does."""
    keep_fast_part(Path(__file__).parent, config, items)


def pytest_unconfigure() -> None:
    if SUMMARY.layouts:
        print(SUMMARY.line())


@pytest.fixture(scope="session")
def summary() -> Summary:
    return SUMMARY


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool("tests.megatron.jobs")
    yield pool
    pool.close()


@dataclass(frozen=True)
class Expected:
    """One checkpoint and what the oracle makes of it."""

    directory: Path
    logprobs: Tensors
    gradients: Tensors
    steps: list[OracleStep]
    weights: Tensors


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ExpectedByFamily:
    return ExpectedByFamily(tmp_path_factory.mktemp("checkpoints"))


class ExpectedByFamily:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Expected] = {}
        self._built: dict[str, Path] = {}

    def directory(self, family: str) -> Path:
        """The checkpoint alone, of which nothing is computed."""
        if family not in self._built:
            self._built[family] = build_checkpoint(family, self._root / family)
        return self._built[family]

    def __call__(self, family: str) -> Expected:
        if family not in self._made:
            torch.set_num_threads(1)
            directory = self.directory(family)
            oracle = Oracle(reference_config(directory, OPTIM))
            rows = make_rows()
            self._made[family] = Expected(
                directory=directory,
                logprobs=oracle.logprobs(rows, SPEC.temperature or 1.0),
                gradients=oracle.gradients(rows, SPEC, NORMALIZER),
                steps=[oracle.step(make_rows(s), SPEC, NORMALIZER) for s in range(STEPS)],
                weights=oracle.weights(),
            )
        return self._made[family]
