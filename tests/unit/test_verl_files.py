"""A file of settings that a command of verl names is read as the command's own keys are."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import ConfigError
from sluice.importers.verl import import_script, read_overrides
from tests.unit.imported_stack import run_command

RUN = "python3 -m verl.trainer.main_ppo"
FILE = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 256, shuffle: False, train_files: [/a.parquet, /b.parquet], seed: null}
actor_rollout_ref:
  actor: {_target_: verl.Actor, optim: {lr: 2.0e-6}}
  rollout: {multi_turn: {enable: True}}
"""


def write(root: Path, text: str = FILE, name: str = "mine.yaml") -> Path:
    """A repository with a file of settings; the folder of its scripts."""
    for folder in ("examples/config", "examples/scripts/deep"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "examples" / "config" / name).write_text(text)
    return root / "examples" / "scripts" / "deep"


@pytest.mark.parametrize(
    "options",
    [
        "--config-path=$CONFIG --config-name=mine",
        '--config-path="${ROOT}/examples/config" --config-name mine.yaml',
        "-cp examples/config -cn mine",
        "--config-path={root}/examples/config --config-name='mine'",
    ],
)
def test_keys_of_the_file_count_unless_the_command_has_them(tmp_path: Path, options: str) -> None:
    folder = write(tmp_path)
    script = 'ROOT="$(pwd)"\nCONFIG="$ROOT/examples/config"\n'
    command = f"{RUN} {options.replace('{root}', str(tmp_path))} data.train_batch_size=64"
    given, told, left = read_overrides(script + command, {}, folder)
    assert given == {
        "data.train_batch_size": "64",
        "data.shuffle": "False",
        "data.train_files": '["/a.parquet", "/b.parquet"]',
        "data.seed": "null",
        "actor_rollout_ref.actor.optim.lr": "2e-06",
        "actor_rollout_ref.rollout.multi_turn.enable": "True",
    }
    assert (told["megatron"], left) == (False, [])


def test_what_the_file_says_is_in_both_documents(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "run.sh").write_text(f"{RUN} --config-path=$X/examples/config --config-name=mine\n")
    status, output, _ = run_command("import-verl", folder / "run.sh", "-o", tmp_path / "o")
    assert status == 0
    assert "multi_turn.enable: by hand" in output
    assert "groups_per_step: 128" in (tmp_path / "o" / "run.yaml").read_text()  # of two samples
    assert "shuffle: false" in (tmp_path / "o" / "run.yaml").read_text()
    assert "learning_rate: 2.0e-06" in (tmp_path / "o" / "services.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ("--config-name=ppo_megatron_trainer.yaml", "megatron"),
        ("--config-path=config --config-name='ppo_trainer'", "fsdp"),
        ("--config-name fully_async_ppo_megatron_trainer", "megatron"),
        ("", "fsdp"),
    ],
)
def test_of_files_of_verl_itself_nothing_is_told(
    options: str, backend: str, tmp_path: Path
) -> None:
    _, services, left = import_script(f"{RUN} {options} a=b", Path("r"), {}, write(tmp_path))
    assert services["services"]["trainer"]["config"]["backend"] == backend
    assert not any("config-name" in line for line in left)


@pytest.mark.parametrize(
    "name", ["other", "$NAME", "../config/other", "ppo_trainer_split", "x" * 200, "\0", ".."]
)
def test_a_file_that_is_not_found_is_told(tmp_path: Path, name: str) -> None:
    command = f"{RUN} --config-path=$X/examples/config --config-name={name} a=b"
    for folder in (write(tmp_path), None):
        (line,) = read_overrides(command, {}, folder)[2]
        assert line.startswith(f"--config-name {name}: its file is not found")


def test_defaults_of_the_file_are_read_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, "data: {seed: 1, a: 1}\ndefaults: [ppo_megatron_trainer]", "base.yaml")
    parts = "{actor@actor_rollout_ref.actor: dp_actor}, {critic: mine}"
    folder = write(tmp_path, f"data: {{a: 2}}\ndefaults: [base, {parts}, nowhere]")
    command = f"{RUN} --config-path=$X/examples/config --config-name=mine"
    given, told, left = read_overrides(command, {}, folder)
    assert (given, told["megatron"]) == ({"data.seed": "1", "data.a": "2"}, True)
    assert [line.split(" is ")[0] for line in left] == [
        "mine.yaml: defaults: mine:",
        "mine.yaml: defaults: nowhere:",
    ]
    write(tmp_path, "data: {a: 2}\ndefaults: [_self_, base]")
    assert read_overrides(command, {}, folder)[0] == {"data.seed": "1", "data.a": "1"}
    write(tmp_path, "defaults: [mine]\nx: 1")  # it names itself
    assert read_overrides(command, {}, folder)[2]


def test_a_name_too_long_for_a_file_is_told(tmp_path: Path) -> None:
    for options in (f"--config-name={'x' * 5000}", f"-cp {'y/' * 3000} -cn z"):
        (line,) = read_overrides(f"{RUN} {options} a=b", {}, tmp_path)[2]
        assert "is not found" in line


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\0", "a: 2024-99-99", "a: &x {b: *x}"])
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        read_overrides(f"{RUN} -cp $X/examples/config -cn mine a=b", {}, folder)
