"""Command lines of SGLang, to the word. Several nodes and prefill/decode are not run anywhere."""

from __future__ import annotations

import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.sglang.commands import (
    command,
    dp_size,
    engine_arguments,
    environment,
    flags,
    model_arguments,
)
from services.rollout.engine.sglang.topology import (
    Encoders,
    ServerGroup,
    Topology,
    bootstrap_urls,
    encoder_arguments,
    launches,
)

SHARED = {"model_path": "/m", "tp_size": 4, "device": "gpu"}
LAUNCH = "py -m sglang.launch_server --model-path /m --tp-size 4 --device gpu"


def lines(topology: Topology) -> list[tuple[str, str, str]]:
    return [(one.role, one.url, " ".join(one.command)) for one in launches(topology)]


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


def test_a_server_over_two_nodes() -> None:
    group = ServerGroup(role="regular", hosts=("n0", "n1"), port=30000)
    assert lines(Topology(python="py", arguments=SHARED, groups=(group,))) == [
        (
            "regular",
            "http://n0:30000",
            f"{LAUNCH} --port 30000 --host n0 --nnodes 2 --node-rank 0 --dist-init-addr n0:20000",
        ),
        (
            "regular",
            "http://n0:30000",
            f"{LAUNCH} --port 30000 --host n1 --nnodes 2 --node-rank 1 --dist-init-addr n0:20000",
        ),
    ]


def test_prefill_and_decode_servers() -> None:
    groups = (
        ServerGroup(role="prefill", hosts=("p",), port=30000, replicas=2),
        ServerGroup(role="decode", hosts=("d",), port=31000, arguments={"tp_size": 8}),
    )
    decode = LAUNCH.replace("--tp-size 4", "--tp-size 8")
    assert lines(Topology(python="py", arguments=SHARED, groups=groups)) == [
        (
            "prefill",
            "http://p:30000",
            f"{LAUNCH} --disaggregation-mode prefill --disaggregation-transfer-backend mooncake"
            " --disaggregation-bootstrap-port 8998 --port 30000 --host p",
        ),
        (
            "prefill",
            "http://p:30001",
            f"{LAUNCH} --disaggregation-mode prefill --disaggregation-transfer-backend mooncake"
            " --disaggregation-bootstrap-port 8999 --port 30001 --host p",
        ),
        (
            "decode",
            "http://d:31000",
            f"{decode} --disaggregation-mode decode --disaggregation-transfer-backend mooncake"
            " --port 31000 --host d",
        ),
    ]


def test_prefill_without_decode_is_refused() -> None:
    group = ServerGroup(role="prefill", hosts=("p",), port=1)
    with pytest.raises(ValueError, match="need each other"):
        launches(Topology(python="py", arguments={}, groups=(group,)))


def test_encoders_come_first_and_whoever_reads_prompts_is_given_their_urls() -> None:
    groups = (
        ServerGroup(role="regular", hosts=("r",), port=1),
        ServerGroup(role="prefill", hosts=("p",), port=2),
        ServerGroup(role="decode", hosts=("d",), port=3),
    )
    encoders = Encoders(places=(("e", 7), ("e", 8)), arguments={"tp_size": 1})
    topology = Topology(python="py", arguments=SHARED, groups=groups, encoders=encoders)
    found = lines(topology)
    assert [role for role, _, _ in found] == ["encoder", "encoder", "regular", "prefill", "decode"]
    assert found[1][2] == (
        f"{LAUNCH.replace('--tp-size 4', '--tp-size 1')} --host e --port 8 --encoder-only"
        " --encoder-transfer-backend zmq_to_scheduler"
    )
    for place, (_, _, line) in enumerate(found[2:]):
        given = (
            "--language-only --encoder-urls http://e:7 http://e:8"
            " --encoder-transfer-backend zmq_to_scheduler"
            f" --encoder-bootstrap-port {9998 + place}"
        )
        assert (given in line) == (place < 2)
    assert bootstrap_urls(topology) == ["http://r:9998", "http://p:9999"]


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


def test_a_server_keeps_routed_experts_where_they_are_wanted_and_its_encoders_never() -> None:
    config = EngineConfig(backend="sglang", routed_experts=True)
    arguments = engine_arguments(config, "gpu")
    assert "--enable-return-routed-experts" in command("py", arguments)
    without = engine_arguments(EngineConfig(backend="sglang"), "gpu")
    assert "--enable-return-routed-experts" not in command("py", without)
    encoder = encoder_arguments(arguments, "e", 1, "zmq_to_scheduler", {})
    assert "--enable-return-routed-experts" not in command("py", encoder)


def test_the_stand_ins_are_asked_for_on_a_cpu_alone() -> None:
    config = EngineConfig(backend="sglang", threads=2)
    on_cpu = environment(config, "cpu", ranks=2)
    assert on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on_cpu["SGLANG_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    assert environment(config, "npu", ranks=2) == {"OMP_NUM_THREADS": "2"}


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
