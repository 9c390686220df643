from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, JsonValue, ValidationError

from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.rollout.engine.config import SglangConfig
from sluice.config import Config, ConfigError, ProcessConfig, load_config, parse_config
from sluice.loop.config import CriticConfig, RunConfig, SftConfig, TeacherConfig
from sluice.place import StorePlace
from sluice.runtime.server import ServerConfig


class OptimConfig(Config):
    lr: float = 1e-6
    betas: tuple[float, ...] = (0.9, 0.95)


class TrainerConfig(ProcessConfig):
    """Trainer service."""

    model: str
    backend: Literal["transformers", "megatron"] = "transformers"
    offload: bool = False
    optim: OptimConfig = OptimConfig()
    extra: dict[str, OptimConfig] = Field(default_factory=dict)
    options: dict[str, JsonValue] = Field(default_factory=dict)
    rates: dict[str, float] = Field(default_factory=dict)
    logs: Path | None = None
    roots: tuple[Path, ...] = ()
    store: StorePlace = Path("/store")


class Listening(ServerConfig, ProcessConfig):
    """A process whose settings are those of a server."""


def write(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return ["--config", str(file)]


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path, monkeypatch):
    file = write(
        tmp_path, "model: from-file\nbackend: megatron\noptim: {lr: 1.0e-5, betas: [0.8, 0.9]}\n"
    )
    monkeypatch.setenv("SLUICE_OPTIM__LR", "2e-5")
    monkeypatch.setenv("SLUICE_OFFLOAD", "true")
    config = load_config(TrainerConfig, [*file, "--model", "from-flag"])
    assert config == parse_config(
        TrainerConfig,
        {
            "model": "from-flag",
            "backend": "megatron",
            "offload": True,
            "optim": {"lr": 2e-5, "betas": (0.8, 0.9)},
        },
    )
    assert type(config) is TrainerConfig


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\noptim: {beta: 1}", r"optim\.beta: unknown key; did you mean betas\?"),
        ("model: m\nmodle: x", r"modle: unknown key; did you mean model\?"),
        (
            "model: m\nzzz: x",
            "zzz: unknown key; known: backend, extra, logs, model, offload, optim, options, rates, "
            "roots, store",
        ),
        ("model: m\nextra: {a: {rate: 1}}", r"extra\.a\.rate: .*known: betas, lr"),
        ("model: m\nbackend: jax", "backend: .*'transformers' or 'megatron'.*'jax'"),
        ("model: m\noptim: {lr: fast}", r"optim\.lr: .*number.*'fast'"),
        ("model: m\noptim: {lr: yes}", r"optim\.lr: is true or false.*True"),
        ("model: m\noptim: {betas: [0.9, off]}", r"optim\.betas: is true or false.*False"),
        ("model: m\nrates: {a: on}", "rates: is true or false"),
        ("model: m\nextra: {a: {lr: no}}", r"extra\.a\.lr: is true or false"),
        ("model: true", "model: is true or false"),
        ("model: m\nlogs: ''", "logs: names no path"),
        ("model: m\nlogs: {router: {kind: router}}", "logs: is a path, not keys and values"),
        ("model: m\nroots: [/data, '']", "roots: names no path"),
        ("model: m\nstore: ''", "store: names no path"),
        ('model: m\nlogs: "a\\0b"', "logs: can be no path: it holds a NUL"),
        (f"model: m\nroots: [/data, {'x' * 256}]", "roots: can be no path: .* too long"),
        (f"model: m\nlogs: {'x/' * 2048}y", "logs: can be no path: .* too long"),
        ("model: m\nstore: file://data/store", "store: .*names no directory, as file:///"),
        ("model: m\nstore: s3:/bucket/run", "store: .*has one slash where a URL has two"),
        ("backend: megatron", "model: Field required"),
        ("- a list", "must hold a mapping"),
        ("model: [", "not valid YAML"),
        ("model: m\nbackend: x\nmodel: n", r"the key 'model' is given twice(.|\n)*line 3"),
        ("model: m\noptim: {lr: 1, lr: 2}", "the key 'lr' is given twice"),
        ("model: m\noptions: &a {b: *a}", "not valid YAML: .*recursive"),
        ("model: " + "[" * 20_000, "not valid YAML: it is nested too deep"),
        ("model: m\n1: 2", "1 is no key of a setting"),
    ],
)
def test_bad_settings_name_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(TrainerConfig, write(tmp_path, text))


def test_a_file_of_another_kind_tells_the_known_keys_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(TrainerConfig, write(tmp_path, "model: m\nzzz: x\nyyy: x\nmodle: x"))
    assert str(caught.value) == (
        "zzz: unknown key; known: backend, extra, logs, model, offload, optim, options, rates, "
        "roots, store; yyy: unknown key; modle: unknown key; did you mean model?"
    )


def test_a_wrong_value_of_a_variable_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_OPTIM__LR", "fast")
    file = write(tmp_path, "model: m")
    with pytest.raises(ConfigError, match=r"^optim\.lr: .*\(got 'fast' of .* SLUICE_OPTIM__LR\)$"):
        load_config(TrainerConfig, file)
    with pytest.raises(ConfigError, match=r"^optim\.lr: .*\(got 'slow'\)$"):
        load_config(TrainerConfig, [*file, "--optim.lr", "slow"])
    with pytest.raises(ConfigError, match=r"^optim\.lr: .*\(got 'fast'\)$"):
        parse_config(TrainerConfig, {"model": "m", "optim": {"lr": "fast"}})


def test_bytes_of_the_environment_that_are_no_text_are_told(monkeypatch):
    """What pydantic was to show of them it could not write."""
    monkeypatch.setenv("SLUICE_HOST", "caf\udce9")  # as Python reads the byte e9
    with pytest.raises(ConfigError, match=r"no UTF-8: 'host caf\\udce9 is not loopback"):
        load_config(Listening, [])


def test_what_is_merged_into_a_mapping_may_be_given_anew(tmp_path):
    text = "model: m\nextra: {a: &a {lr: 1, betas: [0, 0]}, b: {<<: *a, lr: 2}}"
    extra = load_config(TrainerConfig, write(tmp_path, text)).extra
    assert (extra["a"].lr, extra["b"].lr) == (1, 2)
    assert extra["b"].betas == extra["a"].betas


def test_yes_and_no_are_taken_where_they_are_asked_for(tmp_path):
    text = "model: m\noffload: yes\noptions: {a: no, b: {c: [on]}}\nextra: {a: {}}"
    config = load_config(TrainerConfig, write(tmp_path, text))
    assert config.offload
    assert config.options == {"a": False, "b": {"c": [True]}}


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        load_config(TrainerConfig, ["--config", str(tmp_path / "absent.yaml")])


def test_mistyped_environment_variable_is_refused(monkeypatch):
    monkeypatch.setenv("SLUICE_OPTIM__LEARNING_RATE", "1")
    with pytest.raises(ConfigError, match="SLUICE_OPTIM__LEARNING_RATE"):
        load_config(TrainerConfig, ["--model", "m"])


def test_mistyped_flag_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--optim\.l; did you mean --optim\.lr\?"):
        load_config(TrainerConfig, ["--model", "m", "--optim.l", "1"])
    with pytest.raises(ConfigError, match="--model: expected one argument"):
        load_config(TrainerConfig, ["--model"])


def test_insecure_beyond_loopback_must_be_asked_for():
    class Process(ProcessConfig):
        server: ServerConfig = ServerConfig()

    with pytest.raises(ConfigError, match="not loopback"):
        parse_config(Process, {"server": {"host": "0.0.0.0"}})
    assert parse_config(Process, {"server": {"host": "0.0.0.0", "allow_insecure": True}})


@pytest.mark.parametrize("address", ["node", "node:", ":50051", "node:port", "a b:1", "::1:5"])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (RolloutConfig, "router"),
        (SglangConfig, "leader"),
        (ServerConfig, "advertise"),
        (GatewayConfig, "trainer"),
        (RunConfig, "trainer"),
        (RunConfig, "router"),
        (SftConfig, "trainer"),
        (CriticConfig, "address"),
        (TeacherConfig, "address"),
    ],
)
def test_an_address_without_a_port_is_refused_by_its_setting(kind, key, address):
    """Nothing ever answers there: whoever asked would wait for its deadline."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate({key: address})
    assert [e["msg"] for e in found.value.errors() if e["loc"] == (key,)] == [
        f"Value error, {address!r} is not host:port"
    ]


@pytest.mark.parametrize("address", ["node-1.rack:50051", "[::1]:5", "127.0.0.1:65535"])
def test_addresses_are_taken_as_they_are(address):
    assert CriticConfig(address=address).address == address
    assert ServerConfig(advertise=address).advertise == address
    assert CriticConfig(address=f"/run/services.json#{address}").address.endswith(address)


@pytest.mark.parametrize("values", [{"backend": "x" * 10_000}, {"x" * 10_000: 1}])
def test_long_values_and_keys_are_shown_in_part(values):
    with pytest.raises(ConfigError) as refusal:
        parse_config(TrainerConfig, {"model": "m", **values})
    assert 200 < len(str(refusal.value)) < 600


def test_of_a_thousand_faults_the_first_are_told_and_how_many_more_there_are():
    with pytest.raises(ConfigError) as caught:
        parse_config(TrainerConfig, {"model": "m", "optim": {"betas": ["no"] * 1000}})
    told = str(caught.value).split("; ")
    assert (len(told), told[-1]) == (41, "and 960 more")
    assert told[0].startswith("optim.betas.0: ") and told[39].startswith("optim.betas.39: ")
