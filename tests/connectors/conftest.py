from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from examples.models.tiny_qwen3 import build_tiny_qwen3
from tests.connectors.learned import LEARNED
from tests.e2e.conftest import ENVIRONMENT, Stack, start_stack, stop_stack
from tests.service.openai.conftest import TEMPLATE

PYTHON = os.path.abspath("build/verifiers/bin/python")


def pytest_unconfigure() -> None:
    if len(LEARNED) == 2:
        (first, last), (agent_first, agent_last) = LEARNED["copy"], LEARNED["agent"]
        print(
            f"connectors: verifiers first={first:.3f} last={last:.3f} agent_turns=3 "
            f"agent_gain={agent_last - agent_first:.3f}"
        )


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A tiny model with a chat template, behind an OpenAI port; it learns from test to test."""
    run_dir = tmp_path_factory.mktemp("connectors")
    model = build_tiny_qwen3(run_dir / "chat", 0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    ENVIRONMENT["VERIFIERS_PYTHON"] = PYTHON
    stack = start_stack(
        run_dir,
        trainer={
            "kind": "trainer",
            "config": {"model": str(model), "optim": {"learning_rate": 4e-3}},
        },
        rollout={
            "kind": "rollout",
            "config": {
                "tokenizer": str(model),
                "engine": {"max_running": 256, "max_model_length": 24, "threads": 1},
                "openai": {"max_running": 1024},
                "episodes": {"user_modules": ["tests.connectors"]},
                "store_sync": False,
            },
        },
    )
    yield stack
    stop_stack(stack)
