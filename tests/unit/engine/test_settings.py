"""Settings of an engine that would do nothing are refused by their key, and limits name theirs."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.config import RolloutConfig
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Generation, Sampling, check_generation
from services.rollout.errors import PromptTooLongError
from sluice.config import ConfigError, parse_config

RUNNING: dict[str, Any] = {"url": "http://127.0.0.1:30000"}


def sglang(**settings: Any) -> dict[str, Any]:
    return {"backend": "sglang", "sglang": settings}


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"sglang": RUNNING}, r"engine: sglang: has no effect with backend reference"),
        ({"sglang": {"server_args": {"tp_size": 2}}}, r"sglang: has no effect with backend"),
        (sglang(**RUNNING, python="/python"), r"a running server takes no python"),
        (sglang(**RUNNING, environment={"A": "1"}), r"a running server takes no environment"),
        (sglang(**RUNNING, host="10.0.0.1"), r"a running server takes no host"),
        (sglang(**RUNNING, stop_seconds=1), r"a running server takes no stop_seconds"),
        (sglang(**RUNNING) | {"dtype": "float32"}, r"engine: dtype: has no effect on a server"),
        (sglang(**RUNNING) | {"threads": 1}, r"threads: has no effect on a server"),
        (sglang(**RUNNING) | {"prefill_chunk_tokens": 9}, r"prefill_chunk_tokens: has no effect"),
        (sglang(**RUNNING) | {"deterministic": True}, r"deterministic: has no effect on a server"),
        (sglang(encoder_args={"tp_size": 1}), r"encoder_args: has no effect without encoders"),
        (sglang(encoder_backend="mooncake"), r"encoder_backend: has no effect without encoders"),
    ],
)
def test_what_has_no_effect_is_refused_by_its_key(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(RolloutConfig, {"store": "s", "roles": ["engine"], "engine": engine})


@pytest.mark.parametrize(
    "engine",
    [
        sglang(**RUNNING) | {"max_model_length": 99, "max_running": 9, "max_cached_tokens": 99},
        sglang() | {"dtype": "float32", "prefill_chunk_tokens": 9, "threads": 1},
        sglang() | {"deterministic": True},
        sglang(encoders=1, encoder_args={"tp_size": 1}, encoder_backend="mooncake"),
        sglang(python="/python", environment={"A": "1"}, host="10.0.0.1"),
    ],
)
def test_what_has_one_is_taken(engine: dict[str, Any]) -> None:
    config = parse_config(RolloutConfig, {"store": "s", "roles": ["engine"], "engine": engine})
    for name, value in engine["sglang"].items():
        assert str(getattr(config.engine.sglang, name)) == str(value)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    values = {"store": "s", "roles": ["engine"], "engine": {"model": "m"}, "openai": {"port": port}}
    with pytest.raises(ConfigError, match=r"openai\.port"):
        parse_config(RolloutConfig, values)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_running": 1}, "engine.max_model_length is 16"),
        ({"max_cached_tokens": 8}, "engine.max_cached_tokens is 8"),
    ],
)
def test_a_prompt_that_is_too_long_names_the_setting(settings: dict[str, int], said: str) -> None:
    config = parse_config(EngineConfig, {"max_model_length": 16, **settings})
    sampling = Sampling(max_new_tokens=1)
    generation = Generation(request_id="r", prompt_token_ids=[1] * 16, sampling=sampling)
    with pytest.raises(PromptTooLongError) as caught:
        check_generation(generation, 8, config.max_model_length, config)
    told = f"a prompt of 16 tokens leaves no room for an answer: {said}"
    assert str(caught.value) == told
