"""A model learns to answer by an observation, which no prompt tells it and no loss trains."""

import itertools
from collections.abc import Iterator

import pytest

from examples.environments.hidden_digits import HiddenDigits, HiddenDigitsSettings
from services.rollout.environments.environment import Response, Task, TaskRequest, Turn
from sluice.loop.report import read_metrics
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from tests.e2e.conftest import Stack, start_stack, stop_stack

NAME = "examples.environments.hidden_digits:HiddenDigits"
END = 11


@pytest.fixture
def fresh_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Learning begins with the model as it was built, whatever ran before, and ends here."""
    stack = start_stack(tmp_path_factory.mktemp("multi-turn"))
    yield stack
    stop_stack(stack)


class Digits:
    end_token_id: int | None = END

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(digit) for digit in text]


def test_without_the_observation_the_second_turn_cannot_be_solved() -> None:
    """Every task has one prompt, and no fixed answer is right more often than chance."""
    environment = HiddenDigits(HiddenDigitsSettings(digits=2), Digits())
    tasks = [environment.make_task(TaskRequest(index=index)) for index in range(2000)]
    assert {(task.prompt, task.messages) for task in tasks} == {("=", ())}

    def solved(task: Task, digits: tuple[int, ...]) -> float:
        response = Response(token_ids=(*digits, END), turns=(Turn(text="", observation=""),))
        (reward,) = environment.reward(task, [response])
        return reward.raw_reward or 0.0

    best = max(
        sum(solved(task, digits) for task in tasks) / len(tasks)
        for digits in itertools.product(range(10), repeat=2)
    )
    assert best < 0.03, "a policy that reads nothing"
    for task in tasks[:100]:
        shown = environment.step(task, {}, Response(text="")).text
        assert solved(task, tuple(map(int, shown.rstrip("=")))) == 1.0, "one that reads"


@pytest.mark.long
@pytest.mark.timeout(1500)  # minutes, where others use the machine
def test_it_is_learned_by_reading(fresh_stack: Stack) -> None:
    def data(**settings: object) -> dict[str, object]:
        return {
            "prompts": {"index_count": 64, "shuffle": False},
            "environment": {"name": NAME, "settings": {"digits": 1, "seed": 7, **settings}},
        }

    training = fresh_stack.train(
        "hidden",
        prompts={"index_count": 100_000},
        environment={"name": NAME, "settings": {"digits": 1}},
        sampling={"max_new_tokens": 6},
        groups_per_step=16,
        samples_per_group=16,
        steps=80,
        checkpoint_every=0,
        evaluation={
            "datasets": {"shown": {**data(), "stop_at_score": 0.95}, "hidden": data(blank=True)},
            "every_steps": 10,
            "beside_training": False,  # the step that it ends at does not depend on speed
        },
    )
    training.finish(1200)
    scores = {
        (row["evaluation"], row["dataset"]): row["score"]
        for row in read_metrics(training.run_dir)
        if "dataset" in row
    }
    assert scores["before", "shown"] < 0.6
    assert scores["after", "shown"] >= 0.9
    assert scores["after", "hidden"] <= 0.7, "with zeros shown, only the end can be right"
    blobs = BlobStore(fresh_stack.run_dir / "store", sync=False)
    group = next(g for g in reversed(training.groups("consumed")) if blobs.exists(g.blob))
    for sample in decode_group(blobs.get(group.blob)):
        mask = sample.columns.get("loss_mask")
        if mask is not None:
            assert sum(not token for token in mask) == 2, "a digit and = are not trained on"
