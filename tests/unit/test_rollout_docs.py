"""Every snippet of docs/rollout.md runs."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.config import RolloutConfig
from services.rollout.environments.environment import SettingError
from services.rollout.environments.registry import ENVIRONMENTS, create_environment
from services.rollout.reward_model.config import RewardModelConfig
from sluice.config import parse_config
from sluice.loop.config import RunConfig
from sluice.loop.filters import GroupFilters
from sluice.loop.mixture import load_schedule
from sluice.samples.tokenizer import TextTokenizer
from sluice.stack import UpConfig, filled_in

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"
SNIPPET = re.compile(r"```(\w+)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The page's Python files, importable."""
    for language, name, text in SNIPPET.findall(PAGE.read_text()):
        if language == "python":
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project"]:
        del sys.modules[name]


def test_every_snippet_says_which_file_it_is():
    text = PAGE.read_text()
    assert text.count("```") == 2 * len(SNIPPET.findall(text)) > 20


def check_services(values):
    """Whether each process of a services.yaml would take what it is given."""
    config = parse_config(UpConfig, values)
    kinds = {"rollout": RolloutConfig, "reward_model": RewardModelConfig}
    for name, entry in config.services.items():
        if entry.kind in kinds:
            filled = filled_in(config, name, entry) | (
                {"router": "r:1"} if name == "rollout" else {}
            )
            parse_config(kinds[entry.kind], filled)


def test_configurations_are_accepted(project, monkeypatch):
    names = []
    monkeypatch.chdir(project)
    scorer = build_tiny_qwen3(project / "models" / "my-reward-model")
    (scorer / "chat_template.jinja").write_text("{{ messages }}")
    for language, name, text in SNIPPET.findall(PAGE.read_text()):
        if language != "yaml":
            continue
        values = yaml.safe_load(text)
        names.append(name)
        if name == "rollout.yaml":
            base = {"store": "s", "router": "r:1", "tokenizer": "t"}
            parse_config(RolloutConfig, {**base, **values})
            continue
        if name == "services.yaml":
            check_services(values)
            continue
        config = parse_config(
            RunConfig, {"run_dir": "r", "trainer": "t:1", "router": "r:1", **values}
        )
        GroupFilters(config.filters)
        environments = [share.environment for share in config.shares.values()]
        for data in config.evaluation.datasets.values() if config.evaluation else ():
            environments.append(config.environment_of(data))
        load_schedule(config)
        for environment in environments:
            try:
                create_environment(
                    ENVIRONMENTS.get(environment.name, environment.name), environment.settings
                )
            except SettingError as error:
                if "code runs nothing in the open" not in str(error):  # of a kernel without walls
                    raise
    assert sorted(set(names)) == ["rollout.yaml", "run.yaml", "services.yaml"]
    assert len(names) == 12


def test_what_the_page_defines_passes_the_page_s_own_test(project):
    source = (project / "tests" / "test_my_project.py").read_text()
    page: dict = {}
    exec(compile(source, "test_my_project.py", "exec"), page)
    page["test_mine"](TextTokenizer(build_tiny_qwen3(project / "model", 0)))


def test_the_guess_is_played_to_its_end(project):
    games = importlib.import_module("my_project.games")
    from services.rollout.environments.environment import Response, TaskRequest

    guess = games.Guess(games.GuessSettings())
    task = guess.make_task(TaskRequest(index=7))
    state, told = task.state, []
    for answer in ("3", "x", "9", "7"):
        step = guess.step(task, state, Response(text=answer))
        state = step.state
        told.append(step.text)
    assert told == ["higher=", "not a number=", "lower=", ""] and step.done
    (reward,) = guess.reward(task, [Response(text="7", state=state)])
    assert (reward.reward, reward.raw_reward) == (0.25, 1.0)


def test_the_example_of_two_turns_is_accepted():
    examples = Path(__file__).parents[2] / "examples"
    run = yaml.safe_load((examples / "hidden_digits.yaml").read_text())
    config = parse_config(RunConfig, run)
    assert config.evaluation is not None and GroupFilters(config.filters)
    up = yaml.safe_load((examples / "hidden_digits_services.yaml").read_text())
    rollout = up["services"]["rollout"]["config"]
    parse_config(RolloutConfig, {"store": "s", "router": "r:1", **rollout})
    parse_config(UpConfig, up)
