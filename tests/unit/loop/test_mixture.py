"""Environments of a mixture come as their weights say, and as they would without any restart."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import ConfigError, parse_config
from sluice.loop.config import RunConfig
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.mixture import (
    Interleaving,
    Mixture,
    ScheduleError,
    digest_of,
    load_schedule,
    open_sources,
)
from sluice.loop.prompts import load_prompts

NAMES = "abcde"
WHOLE = st.lists(st.integers(1, 9), min_size=1, max_size=5)
ANY = st.lists(st.floats(0.01, 1e3), min_size=1, max_size=5)


def names_of(weights: list[float], count: int) -> str:
    sequence = Interleaving(dict(zip(NAMES, weights, strict=False)), {}, {})
    return "".join(sequence.next() for _ in range(count))


@given(WHOLE, st.integers(1, 4))
def test_every_round_of_whole_weights_is_exact(weights, rounds):
    drawn = names_of(weights, rounds * sum(weights))
    counts = Counter(drawn)
    assert [counts[name] for name in NAMES[: len(weights)]] == [rounds * w for w in weights]


@given(ANY, st.integers(1, 300))
def test_at_no_place_is_any_far_from_its_share(weights, count):
    counts, total = Counter[str](), sum(weights)
    for place, name in enumerate(names_of(weights, count), 1):
        counts[name] += 1
        off = [abs(counts[n] - w * place / total) for n, w in zip(NAMES, weights, strict=False)]
        assert max(off) < len(weights), (place, off)


def test_three_to_one_is_spread_and_not_drawn_in_blocks():
    assert names_of([3, 1], 8) == "aabaaaba"


def groups(first: int, count: int, step: int = 0) -> list[LedgerGroup]:
    return [
        LedgerGroup(position=p, group_id=f"g{p}", state="issued", issue_step=step)
        for p in range(first, first + count)
    ]


def issue(ledger: Ledger, mixture: Mixture, first: int, count: int, step: int = 0) -> list:
    fresh = groups(first, count, step)
    with ledger.transaction():
        ledger.issue([(group.position, group.group_id) for group in fresh], step)
        return [(g.environment, g.task) for g in mixture.assign(fresh)]


def weights_of(step: int, scalars: dict[str, float]) -> dict[str, float]:
    """As a curriculum might: another mixture every second step, `b` not at all for a while."""
    return {"a": 1.0, "b": float(step // 2 % 3) / 3, "c": 0.05 + scalars.get("reward_mean", 0)}


@pytest.mark.parametrize("seed", range(8))
def test_a_mixture_that_was_stopped_goes_on_as_one_that_was_not(tmp_path, seed):
    rng = random.Random(seed)
    first = {"a": 1.0, "b": 1.0, "c": 1.0}
    steady, broken = Ledger(tmp_path / "steady.sqlite"), Ledger(tmp_path / "broken.sqlite")
    scalars = dict[str, float]()
    unbroken = Mixture(first, steady, weights_of, lambda: scalars)
    mixture = Mixture(first, broken, weights_of, lambda: scalars)
    position = 0
    for step in range(20):
        scalars["reward_mean"] = step / 20
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(1, 7)
            expected = issue(steady, unbroken, position, count, step)
            if rng.random() < 0.5:
                broken.close()
                broken = Ledger(tmp_path / "broken.sqlite")
                mixture = Mixture(first, broken, weights_of, lambda: scalars)
            assert issue(broken, mixture, position, count, step) == expected
            position += count
    tasks: dict[str, list[int | None]] = {}
    for group in broken.groups("issued"):
        tasks.setdefault(group.environment, []).append(group.task)
    assert all(numbers == list(range(len(numbers))) for numbers in tasks.values()), tasks
    assert sum(map(len, tasks.values())) == position and set(tasks) == {"a", "b", "c"}
    broken.check()


def test_what_a_transaction_undid_is_handed_out_again(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    weights = {"a": 3.0, "b": 1.0}
    with pytest.raises(RuntimeError), ledger.transaction():
        issue(ledger, Mixture(weights, ledger), 0, 3)
        raise RuntimeError("the disk is full")
    again = issue(ledger, Mixture(weights, ledger), 0, 4)
    assert again == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]


def test_small_shares_come_to_their_turn_though_weights_change_every_step(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def drifting(step: int, scalars: dict[str, float]) -> dict[str, float]:
        return {"a": 1.0, "b": 0.05 + step * 1e-6}

    mixture = Mixture({"a": 1.0, "b": 1.0}, ledger, drifting)
    drawn = [name for step in range(100) for name, _ in issue(ledger, mixture, step * 8, 8, step)]
    assert 37 <= drawn.count("b") <= 40  # 800 places, a share of 0.05 of 1.05


@pytest.mark.parametrize(
    "answer, said",
    [
        ({"a": 1}, "not a weight of each of a, b"),
        ({"a": 1, "b": 1, "c": 1}, "not a weight of each of a, b"),
        ({"a": 1, "b": -1}, "the weight of b is -1"),
        ({"a": float("nan"), "b": 1}, "the weight of a is nan"),
        ({"a": float("inf"), "b": 1}, "the weight of a is inf"),
        ({"a": 1e308, "b": 1e308}, "the weight of a is 1e+308, not within 0..1e+09"),
        ({"a": 10**400, "b": 1}, "the weight of a is 1000"),
        ({"a": True, "b": 1}, "the weight of a is True"),
        ({"a": "1", "b": 1}, "the weight of a is '1'"),
        ({"a": 0, "b": 0}, "all weights are 0"),
        (None, "answered None"),
    ],
)
def test_a_schedule_that_answers_nonsense_is_told_and_nothing_is_issued(tmp_path, answer, said):
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def schedule(step: int, scalars: dict[str, float]) -> dict[str, float]:
        return answer

    with pytest.raises(ScheduleError, match="environment_schedule, step 3: ") as error:
        issue(ledger, Mixture({"a": 1.0, "b": 1.0}, ledger, schedule), 0, 4, step=3)
    assert said in str(error.value)
    assert ledger.next_position() == 0 and ledger.task_counts() == {}


SHARE = {"prompts": {"index_count": 10}, "environment": {"name": "guess"}}
ONE = {"prompts": {"index_count": 10}, "environment": {"name": "guess"}}
BASE = {"run_dir": "r", "trainer": "t:1", "router": "r:1", "sampling": {"max_new_tokens": 5}}
TWO = {"environments": {"a": SHARE, "b": {**SHARE, "weight": 3}}}


def parse(**values) -> RunConfig:
    return parse_config(RunConfig, {**BASE, **values})


def test_what_a_share_leaves_out_is_the_run_s():
    own = {
        "sampling": {"max_new_tokens": 9},
        "samples_per_group": 3,
        "group_timeout_seconds": 7,
    }
    config = parse(environments={"a": SHARE, "b": {**SHARE, **own}}, samples_per_group=6)
    a, b = config.shares["a"], config.shares["b"]
    assert (a.sampling.max_new_tokens, a.samples_per_group, a.group_timeout_seconds) == (5, 6, 600)
    assert (b.sampling.max_new_tokens, b.samples_per_group, b.group_timeout_seconds) == (9, 3, 7)
    sampling = {"max_new_tokens": 5, "temperature": 0.8, "stop_token_ids": [7, 8], "stop": ["x"]}
    config = parse(environments={"a": SHARE, "b": {**SHARE, **own}}, sampling=sampling)
    drawn = config.shares["b"].sampling
    assert drawn is not None
    assert (drawn.max_new_tokens, drawn.temperature, drawn.stop_token_ids) == (9, 0.8, (7, 8))
    assert drawn.stop == ("x",)
    (name, alone), *_ = parse(**ONE).shares.items()
    assert name == "" and alone.samples_per_group == 8


def schedule_of_tests(step: int, scalars: dict[str, float]) -> dict[str, float]:
    return {"a": 1, "b": 1}


HERE = f"{__name__}:schedule_of_tests"


@pytest.mark.parametrize(
    "values, said",
    [
        ({**ONE, **TWO}, "not both"),
        ({"prompts": ONE["prompts"]}, "give environment and prompts, or environments"),
        ({}, "give environment and prompts, or environments"),
        ({"prompts": ONE["prompts"], **TWO}, "not both"),
        ({**ONE, "environment_schedule": HERE}, "no effect without environments"),
        ({"environments": {"../a": SHARE}}, "a name has letters"),
        ({"environments": {"a" * 5000: SHARE}}, "a name has letters"),
        ({"environments": {"a\0": SHARE}}, "a name has letters"),
        ({"environments": {"": SHARE}}, "a name has letters"),
        ({"environments": {"..": SHARE}}, "a name has letters"),
        ({"environments": {"a": {**SHARE, "weight": 0}}}, "greater than 0"),
        ({"environments": {"a": {**SHARE, "weight": float("nan")}}}, "weight"),
        ({"environments": {"a": {**SHARE, "weight": float("inf")}}}, "weight"),
        ({"environments": {"a": {**SHARE, "weight": 1e308}}}, "less than or equal to 1000000000"),
        ({"environments": {"a": {**SHARE, "samples_per_group": 1}}}, "greater than 1"),
        ({"environments": {"a": {**SHARE, "wieght": 1}}}, "wieght"),
        (
            {"environments": {"a": {**SHARE, "sampling": {"max_new_tokens": 5, "temperature": 2}}}},
            "is not that of the run",
        ),
        (
            {**TWO, "evaluation": {"datasets": {"d": {"prompts": ONE["prompts"]}}}},
            "name one of environments",
        ),
        (
            {
                **TWO,
                "evaluation": {"datasets": {"d": {"prompts": ONE["prompts"], "environment": "c"}}},
            },
            "'c' is none of environments: a, b",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        parse(**values)


def test_a_data_set_is_scored_by_the_environment_it_names():
    datasets = {"d": {"prompts": ONE["prompts"], "environment": "b"}}
    other = {**SHARE, "environment": {"name": "other"}, "sampling": {"max_new_tokens": 9}}
    config = parse(environments={"a": SHARE, "b": other}, evaluation={"datasets": datasets})
    assert config.evaluation is not None
    data = config.evaluation.datasets["d"]
    assert config.environment_of(data).name == "other"
    drawn = config.sampling_of(data)
    assert (drawn.max_new_tokens, drawn.temperature) == (9, 0), "greedy, of training's length"


def test_a_schedule_is_imported_by_name():
    schedule = load_schedule(parse(**TWO, environment_schedule=HERE))
    assert schedule is not None and schedule(0, {}) == {"a": 1, "b": 1}
    assert load_schedule(parse(**TWO)) is None


@pytest.mark.parametrize("path", ["nonsense", "no_such_module:f", f"{__name__}:no_such", "a..b:c"])
def test_a_schedule_that_is_none_is_refused_by_name(path):
    with pytest.raises(ConfigError, match="environment_schedule"):
        load_schedule(parse(**TWO, environment_schedule=path))


def test_the_digest_of_tasks_knows_each_environment(tmp_path: Path):
    config = parse(**ONE)
    assert digest_of(open_sources(config)) == load_prompts(config.prompts, config.seed).digest
    mixed = parse(**TWO)
    other = {**SHARE, "prompts": {"index_count": 11}}
    changed = parse(environments={"a": SHARE, "b": {**other, "weight": 3}})
    renamed = parse(environments={"a": SHARE, "c": SHARE})
    weighed = parse(environments={"a": SHARE, "b": SHARE})
    digests = [digest_of(open_sources(each)) for each in (mixed, changed, renamed)]
    assert len(set(digests)) == 3
    assert digest_of(open_sources(weighed)) == digests[0], "weights may change, tasks may not"


def test_the_setting_of_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text('{"prompt": "1="}\n')
    values = {
        "run_dir": "runs/x",
        "trainer": "t:1",
        "router": "r:1",
        "sampling": {"max_new_tokens": 1},
        "environments": {
            name: {"prompts": {"file": str(path)}, "environment": {"name": "prompts"}}
            for name, path in (("sums", there), ("letters", tmp_path / "gone.jsonl"))
        },
    }
    config = RunConfig(**values)
    with pytest.raises(ConfigError, match=r"^environments\.letters\.prompts\.file: .*gone"):
        open_sources(config)
