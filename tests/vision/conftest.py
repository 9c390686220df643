"""Models that see, and the last line of `make test-vision`."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.models.proof import RESULTS, Summary
from tests.rank_pool import Pool
from tests.vision.cases import FAMILIES, SERVED, Model, build_model, differences, layouts

SUMMARY = Summary()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is fast of every model is shown of those that SGLang serves; others take as long."""
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and call.params.get("model", SERVED[0]) not in SERVED:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "fast"]


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="session")
def summary() -> Summary:
    return SUMMARY


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks of Megatron, warm for all modules: to start them costs more than most tests."""
    pool = Pool("tests.megatron.jobs")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cut_ranks() -> Iterator[Pool]:
    """Ranks of the fsdp backend."""
    pool = Pool("tests.vision.fsdp_jobs")
    yield pool
    pool.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None]:
    """What was met, behind everything else; nothing where a test has failed."""
    yield
    if SUMMARY.megatron or SUMMARY.proofs:
        SUMMARY.write(RESULTS)
    if layouts and not exitstatus:
        print(
            f"vision_tests: layouts={len(layouts)} "
            f"max_logprob_diff={differences['logprob']:.1e} "
            f"max_grad_rel={differences['gradient']:.1e}"
        )
