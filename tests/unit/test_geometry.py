"""Figures and puzzles of examples/geometry, judged by their pixels and by other formulas."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from examples.geometry.data_set import write_data_set
from examples.geometry.figures import KINDS, draw_figure, png
from examples.geometry.measured import (
    MeasuredGeometry,
    MeasuredGeometrySettings,
    make_puzzle,
)
from examples.geometry.numbers import (
    CalculationError,
    answered_number,
    calculate,
    read_number,
    read_solution,
    right_number,
)
from examples.geometry.single_turn import Geometry, GeometrySettings
from services.rollout.config import RolloutConfig
from services.rollout.environments.environment import Response, Task, TaskRequest, Turn
from services.rollout.environments.registry import (
    ENVIRONMENTS,
    create_environment,
    load,
    parse_settings,
)
from services.rollout.episodes.environment_contract import check_environment
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import ConfigError, parse_config
from sluice.loop.config import PromptsConfig, RunConfig
from sluice.loop.prompts import load_prompts
from sluice.stack import UpConfig

GEOMETRY = "examples.geometry.single_turn:Geometry"
MEASURED = "examples.geometry.measured:MeasuredGeometry"
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "geometry"
DOTS = {"A": (200, 30, 30), "B": (30, 140, 40), "C": (40, 70, 210), "D": (200, 120, 0)}
HOSTILE = ["", " ", "NaN", "inf", "-inf", "1e999", "9" * 5000, "<answer>" * 600, "\0", "\ud800"]


def dots(pixels: np.ndarray) -> dict[str, complex]:
    """Where the points are, in squares of 18 pixels, by the middle of their colour."""
    found = {}
    for name, colour in DOTS.items():
        rows, columns = np.nonzero((pixels == colour).all(axis=-1))
        if len(rows):
            found[name] = complex((columns.mean() - 20) / 18, (rows.mean() - 20) / 18)
    return found


def spans(a: complex, b: complex, c: complex) -> float:
    """The angle at b in degrees, by the law of cosines in float64."""
    one, two, across = abs(a - b), abs(c - b), abs(a - c)
    return math.degrees(math.acos((one**2 + two**2 - across**2) / (2 * one * two)))


def heron(a: float, b: float, c: float) -> float:
    half = (a + b + c) / 2
    return math.sqrt(max(0.0, half * (half - a) * (half - b) * (half - c)))


def covered(corners: list[complex]) -> float:
    """The area of a polygon by the half-plane to the left of each of its triangles, signed."""
    first, *rest = corners
    total = 0.0
    for b, c in itertools.pairwise(rest):
        turn = ((b - first).conjugate() * (c - first)).imag
        total += math.copysign(heron(abs(b - first), abs(c - b), abs(c - first)), turn)
    return abs(total)


def shapes(pixels: np.ndarray) -> dict[str, int]:
    """Count what is drawn by how much of its box it fills: a half, pi / 4 or all."""
    dark = (pixels == (40, 40, 40)).all(axis=-1)
    counts = {"squares": 0, "circles": 0, "triangles": 0}
    while dark.any():
        stack, seen = [tuple(np.argwhere(dark)[0])], []
        dark[stack[0]] = False
        while stack:
            y, x = stack.pop()
            seen.append((y, x))
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if dark[near]:
                    dark[near] = False
                    stack.append(near)
        places = np.array(seen)
        height, width = np.ptp(places, axis=0) + 1
        filled = len(seen) / (height * width)
        kind = "squares" if filled > 0.95 else "circles" if filled > 0.65 else "triangles"
        counts[kind] += 1
    return counts


@pytest.mark.parametrize("difficulty", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_has_its_answer(kind: Any, difficulty: int) -> None:
    answers = []
    for index in range(25):
        figure = draw_figure(11, index, difficulty, [kind])
        pixels = np.asarray(figure.picture)
        points = dots(pixels)
        if kind == "count":
            asked = figure.question.split()[2]
            found = float(shapes(pixels)[asked])
        elif kind == "length":
            found = sum(abs(b - a) for a, b in itertools.pairwise(points.values()))
        elif kind == "angle":
            names = figure.question.split()[-1].rstrip("?")
            found = spans(*(points[name] for name in names))
        else:
            found = covered(list(points.values()))
        assert figure.answer == pytest.approx(found, rel=0.01, abs=0.5 if kind == "angle" else 0.01)
        answers.append(figure.answer)
    assert len(set(answers)) > 2, "no answer is right for all"


def test_a_seed_and_an_index_say_the_figure() -> None:
    for difficulty, index in itertools.product((1, 2, 3), range(4)):
        first, again, other = (draw_figure(seed, index, difficulty) for seed in (5, 5, 6))
        assert (png(first.picture), first.question) == (png(again.picture), again.question)
        assert png(first.picture) != png(other.picture)
        one, two = (make_puzzle(5, index, difficulty) for _ in range(2))
        assert (png(one.picture), one.answer) == (png(two.picture), two.answer)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_what_is_measured_gives_the_answer_of_a_puzzle(difficulty: int) -> None:
    for index in range(30):
        puzzle = make_puzzle(2, index, difficulty)
        names = "ABCD" if difficulty == 3 else "ABC"
        around = [one + two for one, two in zip(names, names[1:] + names[0], strict=True)]
        sides = [puzzle.measure(side) or math.nan for side in around]
        if difficulty == 1:
            found = sum(sides)
        elif difficulty == 2:
            found = heron(sides[0], sides[1], sides[2])
        else:  # Bretschneider
            a, b, c, d = sides
            p, q = (puzzle.measure(diagonal) or math.nan for diagonal in ("AC", "BD"))
            found = math.sqrt(4 * p**2 * q**2 - (b**2 + d**2 - a**2 - c**2) ** 2) / 4
        assert puzzle.answer == pytest.approx(found, rel=1e-9)
        corner = puzzle.measure("ABC")
        a, b, c = (puzzle.measure(side) or math.nan for side in ("BC", "AC", "AB"))
        assert corner == pytest.approx(
            math.degrees(math.acos((a * a + c * c - b * b) / (2 * a * c))), abs=1e-5
        )
        drawn = dots(np.asarray(puzzle.picture))
        assert abs(drawn["A"] - drawn["B"]) < 0.99 * c or abs(drawn["B"] - drawn["C"]) < 0.99 * a


def pictures(message: Mapping[str, Any]) -> list[np.ndarray]:
    return [
        np.asarray(
            Image.open(
                io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
            ).convert("RGB"),
            np.float64,
        )
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def red(pixels: np.ndarray) -> np.ndarray:
    return np.argwhere((pixels == (220, 40, 40)).all(axis=-1))


def red_side(pixels: np.ndarray) -> str:
    y, x = red(pixels).mean(axis=0) - 15.5
    if abs(y) > abs(x):
        return "AB" if y < 0 else "CD"
    return "BC" if x > 0 else "DA"


def test_the_red_side_and_the_bar_say_the_answer() -> None:
    environment = MeasuredGeometry(MeasuredGeometrySettings(difficulty=0, max_turns=2, seed=3))
    shaped = MeasuredGeometry(MeasuredGeometrySettings(difficulty=0, seed=3, partial=0.25))
    sides = set()
    for index in range(60):
        task = environment.make_task(TaskRequest(index=index))
        (picture,) = pictures(task.messages[0])
        side = red_side(picture)
        sides.add(side)
        step = environment.step(task, task.state, Response(text=side))
        (bar,) = pictures(step.messages[0])
        length = np.ptp(red(bar)[:, 1]) + 1
        assert length % 7 == 0
        turns = (Turn(text=side),)
        read = Response(text=str(length // 7), turns=turns, state=step.state)
        (reward,) = environment.reward(task, [read])
        assert reward.reward == 1.0
        assert reward.scores == {"turns": 2, "measured": 1, "refused": 0}
        guessed = Response(text=str(length // 7), state=task.state)
        assert environment.reward(task, [guessed])[0].reward == 0.0, "nothing was measured"
        assert environment.step(task, step.state, Response(text="AB", turns=turns)).done
        other = next(each for each in "1234" if each != task.answer[0])
        for shown, share in (([float(other)], 0.25), ([], 0.0)):
            state = {**step.state, "measured": shown}
            (part,) = shaped.reward(task, [Response(text=other, turns=turns, state=state)])
            assert (part.reward, part.raw_reward) == (share, 0.0)
    assert sides == {"AB", "BC", "CD", "DA"}


def test_what_is_hidden_is_in_no_picture_and_no_text() -> None:
    for difficulty, asked in ((0, "AB"), (2, "<ask>AB</ask>"), (3, "<ask>ABC</ask>")):
        settings = MeasuredGeometrySettings(difficulty=difficulty, blank=True)
        environment = MeasuredGeometry(settings)
        shown = set()
        for index in range(12):
            task = environment.make_task(TaskRequest(index=index))
            step = environment.step(task, task.state, Response(text=asked))
            shown.add(repr(step.messages))
        assert len(shown) == 1, "the same, whatever there was to measure"


def test_a_tool_answers_what_it_can_and_says_what_it_cannot() -> None:
    environment = MeasuredGeometry(MeasuredGeometrySettings(difficulty=2, max_turns=3))
    task = environment.make_task(TaskRequest(index=0))

    def said(text: str, turns: int = 0) -> str:
        step = environment.step(
            task, task.state, Response(text=text, turns=(Turn(text=""),) * turns)
        )
        return "" if step.done else step.messages[0]["content"][-1]["text"]

    assert said("so <ask>0.5*3*4</ask>") == "0.5*3*4 = 6"
    assert said("<ask>AB</ask>").startswith("AB = ")
    assert said("<ask>AA</ask>").startswith("error: 'AA'")
    assert said("<ask>9**9**9**9</ask>").startswith("error: ")
    assert said("<ask>" + "(" * 5000 + "</ask>") == "", "no request, so the last answer"
    assert said("<ask>AB</ask> or <answer>3</answer>") == ""
    assert said("<ask>AB</ask>", turns=2) == "", "the last answer may ask for nothing"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_get_nothing(text: str) -> None:
    for environment in (
        Geometry(GeometrySettings()),
        MeasuredGeometry(MeasuredGeometrySettings(difficulty=0)),
        MeasuredGeometry(MeasuredGeometrySettings(difficulty=3)),
    ):
        task = environment.make_task(TaskRequest(index=1))
        for answer in (text, f"<answer>{text}</answer>", f"<ask>{text}</ask>"):
            response = Response(text=answer, state={**task.state, "measured": [2.0]})
            assert environment.reward(task, [response])[0].reward == 0.0
            environment.step(task, task.state, response)
    assert right_number(Task(answer="3"), [Response(text=text)]) == [0.0]


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_the_tolerance_is_a_share_of_the_answer(difficulty: int) -> None:
    environment = Geometry(GeometrySettings(difficulty=difficulty, tolerance=0.02))
    for index in range(8):
        task = environment.make_task(TaskRequest(index=index))
        answer = float(task.answer)
        near, off = (f"It is <answer>{answer * share!r}</answer>" for share in (1.019, 1.021))
        rewards = environment.reward(task, [Response(text=near), Response(text=off)])
        assert [reward.reward for reward in rewards] == [1.0, 0.0]


@given(
    st.recursive(
        st.floats(0.1, 100).map(lambda x: f"{x:.3f}"),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda parts: f"({''.join(parts)})"
        ),
        max_leaves=12,
    )
)
def test_the_calculator_computes_as_numpy_does(text: str) -> None:
    try:
        expected = float(eval(text))  # the expression of this test's own making
    except ZeroDivisionError:
        expected = math.nan
    if len(text) > 200 or not math.isfinite(expected):
        with pytest.raises(CalculationError):
            calculate(text)
    else:
        assert calculate(text) == pytest.approx(expected, rel=1e-12)


def test_the_calculator_knows_degrees_and_refuses_the_rest() -> None:
    assert calculate("sin(30) + cos(60) + tan(45) + sqrt(16)/pi*pi") == pytest.approx(6.0)
    for text in (
        *("", "()", "x", "__import__('os')", "sqrt(-1)", "(-8)**0.5", "1/0", "1e999", "9" * 201),
        *(
            "sqrt(1, 2)",
            "'a'*9",
            "True",
            "[1][0]",
            "1 if 1 else 2",
            "\0",
            "((-8)**.5)*sqrt((-8)**.5)",
        ),
    ):
        with pytest.raises(CalculationError):
            calculate(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0),
        ("2 \\sqrt { 13 }", 2 * 13**0.5),
        ("\\frac { 3 } { 4 }", 0.75),
        ("\\frac{\\sqrt{3}}{2}", 3**0.5 / 2),
        ("$ 9 \\pi $", 9 * math.pi),
        ("90^\\circ", 90.0),
        ("5 \\cdot 2^3", 40.0),
    ],
)
def test_answers_of_data_sets_are_read(text: str, value: float) -> None:
    assert read_solution(text) == pytest.approx(value)
    task = Task(answer=text)
    said = [f"<answer>{value}</answer>", f"<answer>{text}</answer>", f"{value * 1.02}", "none"]
    assert right_number(task, [Response(text=each) for each in said]) == [1.0, 1.0, 0.0, 0.0]


def test_numbers_are_read_strictly() -> None:
    assert [read_number(t) for t in ("7", " -1.5e1 ", ".5", "60°")] == [7.0, -15.0, 0.5, 60.0]
    for text in ("1_000", "0x10", "٣", "1 2", "1,5", "--1", "3 cm"):
        assert read_number(text) is None
    assert answered_number("<answer>1</answer> no, <answer>2</answer>") == 2.0


def test_both_environments_keep_the_contract() -> None:
    asking = ("<ask>AB</ask>", "<ask>1+1</ask>", "<answer>3</answer>", "AB")
    for difficulty in (1, 2, 3):
        requests = [TaskRequest(index=index) for index in range(4)]
        check_environment(GEOMETRY, {"difficulty": difficulty}, requests, answers=asking)
        check_environment(MEASURED, {"difficulty": difficulty}, requests, answers=asking)
    check_environment(MEASURED, {"difficulty": 0}, [TaskRequest(index=0)], answers=asking)


# --- files


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_data_set_on_a_disk_becomes_tasks(tmp_path: Path, form: str) -> None:
    write_data_set(tmp_path, 8, seed=4, difficulty=2)
    run = RunConfig.model_validate(yaml.safe_load((EXAMPLES / "geometry3k.yaml").read_text()))
    source = load_prompts(
        PromptsConfig(file=tmp_path / f"train.{form}", shuffle=False), 0, run.environment
    )
    environment = create_environment(ENVIRONMENTS["prompts"], run.environment.settings, None)
    for index in range(8):
        figure = draw_figure(4, index, 2)
        row = source.task(index)
        assert isinstance(row, dict)
        task = environment.make_task(TaskRequest(row=row))
        assert isinstance(task, Task)
        image, text = task.messages[-1]["content"]
        assert figure.question in text["text"]
        held = image["image"]
        if form == "jsonl":
            data = (tmp_path / held).read_bytes()
        else:
            data = base64.b64decode(held["bytes"].partition(",")[2])
        assert data == png(figure.picture)
        assert right_number(task, [Response(text=str(figure.answer))]) == [1.0]


PLACES = ("cpu", "cuda", "npu")
SERVICES = {"trainer": TrainerConfig, "rollout": RolloutConfig, "router": RouterConfig}


def accept_services(document: Any, directory: Path) -> set[str]:
    """Parse `sluice up` and every service of it as its process does; the kinds."""
    up = parse_config(UpConfig, document)
    for entry in up.services.values():
        given = {"store": directory, **entry.config}
        if "model" in given:  # it is built or fetched first
            (directory / "config.json").write_text("{}")
            given["model"] = str(directory)
        if entry.kind == "rollout":
            given.setdefault("router", "127.0.0.1:1")
        if entry.kind == "router":
            given.pop("store")
        SERVICES[entry.kind].model_validate(given)
    return {entry.kind for entry in up.services.values()}


def accept_run(document: Any) -> RunConfig:
    run = parse_config(RunConfig, document)
    sets = run.evaluation.datasets.values() if run.evaluation else ()
    for environment in (run.environment, *(each.environment for each in sets)):
        if environment is not None:
            path = ENVIRONMENTS.get(environment.name, environment.name)
            parse_settings(load(path), environment.settings)
    return run


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("place", PLACES)
def test_run_files_are_accepted(place: str, algorithm: str, tmp_path: Path) -> None:
    run = accept_run(yaml.safe_load((EXAMPLES / place / f"{algorithm}.yaml").read_text()))
    path = EXAMPLES / place / f"{algorithm}_services.yaml"
    services = yaml.safe_load(path.read_text())
    assert accept_services(services, tmp_path) == {"router", "trainer", "rollout"}
    assert run.algorithm.advantage.name == {"grpo": "grpo", "ppo": "gae"}[algorithm]
    assert ("critic" in services["services"]) == (run.critic is not None) == (algorithm == "ppo")
    assert str(run.services) == f"{services['run_dir']}/services.json"
    modules = services["services"]["rollout"]["config"]["episodes"]["user_modules"]
    assert "examples" in modules


def test_the_run_on_rows_is_accepted() -> None:
    accept_run(yaml.safe_load((EXAMPLES / "geometry3k.yaml").read_text()))


def keys(document: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(document, dict):
        return []
    return [
        each
        for name, value in document.items()
        if name not in ("server_args", "environment")
        for each in ((*path, name), *keys(value, (*path, name)))
    ]


def misspelt(document: Any, path: tuple[str, ...]) -> Any:
    copy = yaml.safe_load(yaml.safe_dump(document))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[f"{path[-1]}x"] = inner.pop(path[-1])
    return copy


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("place", PLACES)
def test_a_misspelt_key_of_a_run_file_is_refused(
    place: str, algorithm: str, tmp_path: Path
) -> None:
    run = yaml.safe_load((EXAMPLES / place / f"{algorithm}.yaml").read_text())
    for path in keys(run):
        if path[:2] == ("evaluation", "datasets") and len(path) == 3:
            continue  # a name of one's own
        with pytest.raises((ConfigError, ValueError)):
            accept_run(misspelt(run, path))
    services = yaml.safe_load((EXAMPLES / place / f"{algorithm}_services.yaml").read_text())
    for path in keys(services):
        if path[0] == "services" and len(path) == 2:
            continue
        with pytest.raises((ConfigError, ValueError)):
            accept_services(misspelt(services, path), tmp_path)
