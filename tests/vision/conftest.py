"""Models that see, and the last line of `make test-vision`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vision.cases import FAMILIES, Model, build_model, differences, layouts


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    if layouts:
        terminalreporter.write_line(
            f"vision_tests: layouts={len(layouts)} "
            f"max_logprob_diff={differences['logprob']:.1e} "
            f"max_grad_rel={differences['gradient']:.1e}"
        )
