"""Command lines of SGLang, to the word."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.sglang.servers import (
    command,
    dp_size,
    encoder_arguments,
    engine_arguments,
    environment,
    flags,
    model_arguments,
)
from sluice.weights.convert.quantized_layout import Fp8Blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "sglang", "prefix_cache_tokens": 100_000}, "no effect on SGLang"),
        (
            {"backend": "sglang", "prefix_cache_tokens": 0, "sglang": {"url": "http://a:1"}},
            "start that one with disable_radix_cache",
        ),
        ({"deterministic": True, "prefix_cache_tokens": 100_000}, "no effect with deterministic"),
    ],
)
def test_a_prefix_cache_that_would_not_be_as_told_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=f"prefix_cache_tokens: .*{message}"):
        EngineConfig.model_validate(settings)


def test_arguments_become_flags() -> None:
    arguments = {
        "tp_size": 2,
        "skip_tokenizer_init": True,
        "disable_radix_cache": False,
        "quantization": None,
        "encoder_urls": ["http://a", "http://b"],
        "json_model_override_args": {"a": 1},
    }
    assert flags(arguments) == [
        *("--tp-size", "2", "--skip-tokenizer-init"),
        *("--encoder-urls", "http://a", "http://b"),
        *("--json-model-override-args", '{"a":1}'),
    ]


def test_an_encoder_is_given_what_concerns_the_model_and_its_own_arguments() -> None:
    shared = {"model_path": "/m", "tp_size": 4, "language_only": True, "max_running_requests": 8}
    own = {"tp_size": 1}
    assert " ".join(command("py", encoder_arguments(shared, "e", 8, "mooncake", own))) == (
        "py -m sglang.launch_server --model-path /m --tp-size 1 --host e --port 8 --encoder-only"
        " --encoder-transfer-backend mooncake"
    )


@pytest.mark.parametrize("device", ["cpu", "npu", "gpu"])
def test_what_follows_from_settings_gives_way_to_server_args(device: str) -> None:
    sglang = SglangConfig(server_args={"attention_backend": "mine", "dp_size": 2})
    config = EngineConfig(backend="sglang", max_running=7, prefix_cache_tokens=0, sglang=sglang)
    arguments = engine_arguments(config, device)
    assert arguments["attention_backend"] == "mine"
    assert (arguments["device"], arguments["max_running_requests"]) == (device, 7)
    assert arguments["disable_radix_cache"] is True
    assert "chunked_prefill_size" not in arguments
    assert ("cuda_graph_backend_decode" in arguments) == (device == "cpu")
    assert dp_size(config) == 2


@pytest.mark.parametrize(
    ("arguments", "ranks", "running"),
    [
        ({"dp_size": 2}, 2, 7),
        ({"data_parallel_size": 2}, 2, 7),
        ({"dp_size": 2, "enable_dp_attention": True}, 2, 14),
        ({"attn_dp_size": 2}, 2, 14),
        ({"attention_data_parallel_size": 4}, 4, 28),
        ({"attn_dp_size": 2, "max_running_requests": 5}, 2, 5),
    ],
)
def test_every_data_parallel_rank_runs_as_many_samples_as_are_let_in(
    arguments: dict[str, Any], ranks: int, running: int
) -> None:
    """SGLang divides what it is given by the ranks of attention, and by no others."""
    sglang = SglangConfig(server_args={"tp_size": 4, **arguments})
    config = EngineConfig(backend="sglang", max_running=7, sglang=sglang)
    assert dp_size(config) == ranks
    assert engine_arguments(config, "gpu")["max_running_requests"] == running


def test_a_server_keeps_routed_experts_where_they_are_wanted_and_its_encoders_never() -> None:
    config = EngineConfig(backend="sglang", routed_experts=True)
    arguments = engine_arguments(config, "gpu")
    assert "--enable-return-routed-experts" in command("py", arguments)
    without = engine_arguments(EngineConfig(backend="sglang"), "gpu")
    assert "--enable-return-routed-experts" not in command("py", without)
    encoder = encoder_arguments(arguments, "e", 1, "zmq_to_scheduler", {})
    assert "--enable-return-routed-experts" not in command("py", encoder)


def test_a_model_in_fp8_is_served_as_its_config_says() -> None:
    """SGLang reads the blocks out of config.json, as a publication has them there."""
    document: dict[str, object] = {"max_position_embeddings": 32768}
    published = {**document, "quantization_config": Fp8Blocks().config(["lm_head"])}
    config = EngineConfig(backend="sglang", dtype="bfloat16")

    def line(document: dict[str, object], config: EngineConfig) -> str:
        shared = {**model_arguments(config, document), **engine_arguments(config, "gpu")}
        return " ".join(command("py", shared))

    assert line(published, config) == line(document, config)
    assert "--dtype bfloat16" in line(published, config)
    assert "--quantization" not in line(published, config)
    own = SglangConfig(server_args={"quantization": "fp8", "fp8_gemm_runner_backend": "triton"})
    asked = line(published, EngineConfig(backend="sglang", dtype="bfloat16", sglang=own))
    assert "--quantization fp8 --fp8-gemm-runner-backend triton" in asked


def test_tokens_are_drafted_by_the_layer_of_the_model_itself() -> None:
    sglang = SglangConfig(speculative_steps=3)
    words = " ".join(
        command("py", engine_arguments(EngineConfig(backend="sglang", sglang=sglang), "gpu"))
    )
    assert (
        "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
        " --speculative-num-draft-tokens 4"
    ) in words
    without = command("py", engine_arguments(EngineConfig(backend="sglang"), "gpu"))
    assert not any("speculative" in word for word in without)
    with pytest.raises(ValueError, match="takes no speculative_steps"):
        SglangConfig(url="http://there:1", speculative_steps=3)


def test_the_stand_ins_are_asked_for_on_a_cpu_alone() -> None:
    config = EngineConfig(backend="sglang", threads=2)
    on_cpu = environment(config, "cpu", ranks=2)
    assert on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on_cpu["SGLANG_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    on_npu = {"OMP_NUM_THREADS": "2", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
    assert environment(config, "npu", ranks=2) == on_npu


def test_a_context_is_asked_for_only_where_the_model_has_more() -> None:
    config = EngineConfig(backend="sglang", max_model_length=100)
    assert model_arguments(config, {"max_position_embeddings": 4096}) == {
        "context_length": 108,
        "skip_tokenizer_init": True,
    }
    short = {"text_config": {"max_position_embeddings": 64}, "vision_config": {}}
    assert model_arguments(config, short) == {"context_length": None, "skip_tokenizer_init": False}
    assert command("py", {"a": None}) == ("py", "-m", "sglang.launch_server")


def test_a_running_server_takes_no_arguments() -> None:
    for name in ("port", "host", "api_key", "model_path", "dp-size"):
        with pytest.raises(ValueError, match=f"server_args.{name}"):
            SglangConfig(server_args={name: "1"})
    with pytest.raises(ValueError, match="takes no server_args"):
        SglangConfig(url="http://a", server_args={"tp_size": 2})
