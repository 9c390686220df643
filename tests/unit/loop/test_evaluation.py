"""The evaluation lane over a real server whose scores follow a script."""

import asyncio
import json
from collections import Counter

import grpc
import pytest

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.router.v1 import router_service_pb2_grpc as router_grpc
from sluice.client import RouterClient
from sluice.config import ConfigError, parse_config
from sluice.loop.config import RunConfig
from sluice.loop.evaluation import EvaluationError, EvaluationLane, score_now
from sluice.loop.report import RunReport
from sluice.loop.workers import EpisodeWorkers, build_evaluation
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE

INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]
DATASETS = {
    "greedy": {"prompts": {"index_count": 3, "shuffle": False}, "groups": 3},
    "sampled": {
        "prompts": {"index_count": 4, "shuffle": False},
        "environment": {"name": "other"},
        "sampling": {"max_new_tokens": 9, "temperature": 0.7},
        "groups": 4,
        "samples": 4,
        "pass_at": [1, 4],
    },
}


class Episodes(pb_grpc.RolloutServiceServicer, router_grpc.RouterServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.requests: list[pb.EvaluateRequest] = []
        self.failing: dict[str, int] = {}  # group -> times it fails yet
        self.failure = INTERNAL
        self.gate = asyncio.Event()
        self.gate.set()
        self.breaks = 0
        self.cancelled: list[str] = []
        self.refuses = False

    async def ListEngines(self, request, context):
        worker = router_pb.Engine(
            engine_id="e",
            address=self.address,
            role=request.role,
            state=router_pb.ENGINE_STATE_ACTIVE,
            weights={"version": 3},
        )
        return router_pb.ListEnginesResponse(engines=[worker])

    async def CancelRollout(self, request, context):
        self.cancelled.append(request.rollout_request_id)
        return pb.CancelRolloutResponse()

    async def Evaluate(self, request, context):
        self.requests.append(request)
        if self.refuses:
            raise InvalidFieldError("environment.name", "is unknown")
        await self.gate.wait()
        rollout = request.rollout
        for group in rollout.groups:
            if self.breaks:
                self.breaks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "worker dies")
            if self.failing.get(group.group_id, 0):
                self.failing[group.group_id] -= 1
                failed = pb.FailedGroup(group_id=group.group_id)
                failed.error.code, failed.error.message = self.failure, "grader broke"
                yield pb.EvaluateResponse(failed=failed)
                continue
            passes = [float(i == group.index) for i in range(rollout.sample_count)]
            yield pb.EvaluateResponse(
                finished=pb.FinishedGroup(
                    group_id=group.group_id,
                    rewards=passes,
                    raw_rewards=passes,
                    response_lengths=[2] * rollout.sample_count,
                    min_version=3,
                    max_version=3 + (rollout.versions.HasField("min_version")),
                )
            )


class World:
    def __init__(self, tmp_path, episodes, workers) -> None:
        self.path, self.episodes, self.workers = tmp_path, episodes, workers

    def lane(
        self, datasets=DATASETS, deterministic=False, attempts=3, **evaluation
    ) -> EvaluationLane:
        self.report = RunReport(self.path, 10)
        config = self.config(datasets, deterministic, attempts, **evaluation)
        return EvaluationLane(config, self.workers, self.report)

    def config(self, datasets=DATASETS, deterministic=False, attempts=3, **evaluation) -> RunConfig:
        return parse_config(
            RunConfig,
            {
                "run_dir": self.path,
                "trainer": "t:1",
                "router": "r:1",
                "prompts": {"index_count": 1},
                "environment": {"name": "train"},
                "sampling": {
                    "max_new_tokens": 5,
                    "top_p": 0.9,
                    "stop_token_ids": [7],
                    "stop": ["x"],
                },
                "deterministic": deterministic,
                "group_attempts": attempts,
                "evaluation": {"datasets": datasets, **evaluation},
            },
        )

    def rows(self):
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
async def world(tmp_path):
    server = Server(ServerConfig(drain_seconds=0.1))
    episodes = Episodes()
    server.add(pb_grpc.add_RolloutServiceServicer_to_server, episodes, "rollout")
    server.add(router_grpc.add_RouterServiceServicer_to_server, episodes, "router")
    await server.start()
    episodes.address = server.address
    router = RouterClient(server.address)
    workers = EpisodeWorkers(router, SecurityConfig(), 60)
    yield World(tmp_path, episodes, workers)
    episodes.gate.set()
    await workers.close()
    await router.close()
    await server.stop()


async def test_every_data_set_has_its_own_sampling_and_its_row(world) -> None:
    async with asyncio.timeout(PATIENCE):
        await world.lane().measure("before", 0, 3)
    greedy, sampled = world.episodes.requests
    assert greedy.rollout.environment.name == "train"
    assert greedy.rollout.sampling.temperature == 0 and greedy.rollout.sample_count == 1
    assert (greedy.rollout.sampling.max_new_tokens, greedy.rollout.sampling.top_p) == (5, 1)
    assert greedy.rollout.sampling.stop_token_ids == [7]
    assert greedy.rollout.sampling.stop == sampled.rollout.sampling.stop == ["x"]
    assert sampled.rollout.environment.name == "other"
    drawn = sampled.rollout.sampling
    assert (drawn.temperature, drawn.max_new_tokens) == (pytest.approx(0.7), 9)
    left_out = drawn.top_p, list(drawn.stop_token_ids)
    assert left_out == (pytest.approx(0.9), [7]), "which is that of training"
    assert sampled.rollout.versions.exact_version == 3
    assert list(sampled.pass_at) == [1, 4]
    rows = world.rows()
    assert [(row["dataset"], row["groups"], row["failed_groups"]) for row in rows] == [
        ("greedy", 3, 0),
        ("sampled", 4, 0),
    ]
    assert rows[0]["score"] == pytest.approx(1 / 3), "one of three tasks passes"
    assert rows[1]["score"] == pytest.approx(1 / 4)
    assert (rows[1]["pass@1"], rows[1]["pass@4"]) == (pytest.approx(0.25), 1.0)
    assert (rows[1]["weight_version"], rows[1]["version_min"], rows[1]["version_max"]) == (3, 3, 3)


async def test_no_task_is_scored_twice_where_there_are_fewer_than_groups(world) -> None:
    lane = world.lane({"few": {"prompts": {"index_count": 3}}})  # and 64 groups by default
    async with asyncio.timeout(PATIENCE):
        await lane.measure("before", 0, 3)
    (request,) = world.episodes.requests
    assert sorted(group.index for group in request.rollout.groups) == [0, 1, 2]
    (row,) = world.rows()
    assert row["groups"] == 3
    assert row["score"] == pytest.approx(1 / 3), "one of three tasks passes"


def test_a_group_has_as_long_as_its_environment_gives_it_in_training() -> None:
    share = {"prompts": {"index_count": 3}, "environment": {"name": "train"}}
    data = {"prompts": {"index_count": 3}, "environment": "slow"}
    config = parse_config(
        RunConfig,
        {
            "run_dir": "run",
            "trainer": "t:1",
            "router": "r:1",
            "environments": {"slow": {**share, "group_timeout_seconds": 900}, "quick": share},
            "sampling": {"max_new_tokens": 5},
            "group_timeout_seconds": 60,
            "evaluation": {
                "datasets": {
                    "slow": data,
                    "quick": {**data, "environment": "quick"},
                    "other": {**data, "environment": {"name": "own"}},
                }
            },
        },
    )
    assert config.evaluation is not None
    seconds = {
        name: build_evaluation(
            config, each, [("eval-0-x-0", 0)], engine_pb.VersionBounds(), 0
        ).rollout.group_timeout.seconds
        for name, each in config.evaluation.datasets.items()
    }
    assert seconds == {"slow": 900, "quick": 60, "other": 60}


async def test_seeds_are_those_of_the_task_at_every_step(world) -> None:
    lane = world.lane()
    async with asyncio.timeout(PATIENCE):
        await lane.measure("before", 0, 3)
        await lane.measure("after", 7, 4)
    first, later = (world.episodes.requests[i].rollout for i in (1, 3))
    assert [list(g.seeds) for g in first.groups] == [list(g.seeds) for g in later.groups]
    assert len({seed for group in first.groups for seed in group.seeds}) == 16
    assert {g.group_id for g in first.groups}.isdisjoint(g.group_id for g in later.groups)


async def test_it_runs_beside_training_and_at_most_once_at_a_time(world) -> None:
    lane = world.lane(every_steps=2)
    assert [step for step in range(7) if lane.is_due(step)] == [2, 4, 6]
    assert lane.is_beside
    world.episodes.gate.clear()
    lane.begin(2, 3)
    async with asyncio.timeout(PATIENCE):
        while not world.episodes.requests:
            await asyncio.sleep(0.01)
    lane.begin(4, 4)  # returns at once: training does not wait
    assert world.rows() == []
    world.episodes.gate.set()
    async with asyncio.timeout(PATIENCE):
        await lane.settle()
    rows = world.rows()
    assert [(row["step"], row["evaluation"]) for row in rows] == [(2, "during")] * 2
    assert (rows[0]["weight_version"], rows[0]["version_min"], rows[0]["version_max"]) == (3, 3, 4)
    assert world.episodes.requests[0].rollout.versions.min_version == 3


async def test_deterministic_runs_and_those_that_say_so_wait(world) -> None:
    assert not world.lane(beside_training=False).is_beside
    assert not world.lane(deterministic=True).is_beside


@pytest.mark.parametrize("attempts", [1, 3, 6])
async def test_a_task_that_fails_is_tried_as_often_as_a_group_of_training(world, attempts) -> None:
    episodes = world.episodes
    episodes.failing = {"eval-0-greedy-1": 99}
    async with asyncio.timeout(PATIENCE):
        lane = world.lane({"greedy": DATASETS["greedy"]}, attempts=attempts)
        await lane.measure("before", 0, 3)
    asked = Counter(g.group_id for r in episodes.requests for g in r.rollout.groups)
    assert asked == {"eval-0-greedy-0": 1, "eval-0-greedy-1": attempts, "eval-0-greedy-2": 1}
    assert world.rows()[-1]["failed_groups"] == 1


async def test_failures_are_tried_again_and_hopeless_tasks_counted(world) -> None:
    episodes = world.episodes
    episodes.failing = {"eval-0-greedy-1": 2}
    async with asyncio.timeout(PATIENCE):
        await world.lane({"greedy": DATASETS["greedy"]}).measure("before", 0, 3)
    asked = Counter(g.group_id for r in episodes.requests for g in r.rollout.groups)
    assert asked == {"eval-0-greedy-0": 1, "eval-0-greedy-1": 3, "eval-0-greedy-2": 1}
    assert len({r.rollout.request_id for r in episodes.requests}) == 3, "a failure is not repeated"
    episodes.failing, episodes.failure = {"eval-1-greedy-0": 99}, INVALID
    async with asyncio.timeout(PATIENCE):
        await world.lane({"greedy": DATASETS["greedy"]}).measure("after", 1, 3)
    row = world.rows()[-1]
    assert (row["groups"], row["failed_groups"], row["score"]) == (2, 1, 0.0)


async def test_a_lost_worker_is_asked_again_for_the_same(world) -> None:
    world.episodes.breaks = 5  # the channel itself tries four times
    async with asyncio.timeout(PATIENCE):
        await world.lane({"greedy": DATASETS["greedy"]}).measure("before", 0, 3)
    assert len({r.rollout.request_id for r in world.episodes.requests}) == 1
    assert world.rows()[0]["groups"] == 3


async def test_nothing_scored_is_an_error_and_beside_training_a_note(world, capsys) -> None:
    world.episodes.refuses = True
    lane = world.lane(every_steps=1)
    with pytest.raises(EvaluationError, match=r"greedy: all 3 tasks failed.*is unknown"):
        await lane.measure("before", 0, 3)
    lane.begin(1, 3)
    async with asyncio.timeout(PATIENCE):
        await lane.settle()
    assert world.rows() == []
    assert "evaluation failed" in capsys.readouterr().err


async def test_a_data_set_that_fails_keeps_no_other_from_its_scores(world) -> None:
    world.episodes.failing = {f"eval-4-greedy-{i}": 9 for i in range(3)}
    lane = world.lane(every_steps=4)
    with pytest.raises(EvaluationError, match=r"^greedy: all 3 tasks failed: grader broke$"):
        async with asyncio.timeout(PATIENCE):
            await lane.measure("during", 4, 3)
    assert [row["dataset"] for row in world.rows()] == ["sampled"]


async def test_rows_too_large_for_one_call_go_in_several(world) -> None:
    with (world.path / "large.jsonl").open("w") as file:
        for text in "abcdef":
            row = {"prompt": text, "answer": "1", "tests": text * 4_000_000}
            file.write(json.dumps(row) + "\n")
    data = {"prompts": {"file": str(world.path / "large.jsonl"), "shuffle": False}}
    async with asyncio.timeout(PATIENCE):
        await world.lane({"large": data}).measure("before", 0, 3)
    assert [len(request.rollout.groups) for request in world.episodes.requests] == [3, 3]
    assert world.rows()[0]["groups"] == 6


async def test_scores_of_now_wait_for_no_version_that_engines_leave(world, capsys) -> None:
    async with asyncio.timeout(PATIENCE):
        await score_now(world.config(), world.episodes.address)
    for request in world.episodes.requests:
        bounds = request.rollout.versions
        assert bounds.min_version == 3 and not bounds.HasField("exact_version")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["evaluation"], row["version_max"]) for row in rows] == [("now", 4)] * 2
    assert not any("step" in row for row in rows)  # 0 would be read as that of the weights


async def test_what_is_given_up_is_not_sampled_for_nobody(world) -> None:
    world.episodes.gate.clear()
    scoring = asyncio.create_task(score_now(world.config(), world.episodes.address))
    async with asyncio.timeout(PATIENCE):
        while not world.episodes.requests:
            await asyncio.sleep(0.01)
        scoring.cancel()
        await asyncio.wait([scoring])
    assert scoring.cancelled()
    assert world.episodes.cancelled == [world.episodes.requests[0].rollout.request_id]


async def test_scores_of_now_are_not_those_of_rewards_as_they_were(world) -> None:
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            await score_now(world.config(), world.episodes.address)
    first, again = world.episodes.requests[0].rollout, world.episodes.requests[2].rollout
    assert first.request_id != again.request_id, "a worker would tell what it has told before"
    again.request_id = first.request_id
    assert first == again, "the same samples"


def test_sampling_of_a_data_set_may_leave_out_any_of_training() -> None:
    prompts = {"index_count": 3}
    values = {
        "run_dir": "run",
        "trainer": "t:1",
        "router": "r:1",
        "environments": {
            "long": {
                "prompts": prompts,
                "environment": {"name": "train"},
                "sampling": {"stop": ["x"]},
            }
        },
        "sampling": {"max_new_tokens": 5, "top_k": 3},
        "evaluation": {
            "datasets": {
                "warm": {
                    "prompts": prompts,
                    "environment": "long",
                    "sampling": {"temperature": 0.5},
                }
            }
        },
    }
    config = parse_config(RunConfig, values)
    assert config.evaluation is not None
    drawn = config.sampling_of(config.evaluation.datasets["warm"])
    assert (drawn.max_new_tokens, drawn.temperature, drawn.top_k) == (5, 0.5, 3)
    assert drawn.stop == ("x",)
    assert config.training_sampling(config.environments["long"]).max_new_tokens == 5
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens: Field required"):
        parse_config(RunConfig, {**values, "sampling": {"top_k": 3}})


async def test_what_was_reported_is_not_measured_again_but_what_was_undone_is(world) -> None:
    lane = world.lane()
    async with asyncio.timeout(PATIENCE):
        await lane.measure("during", 4, 3)
        await lane.measure("during", 4, 3)
        assert len(world.rows()) == 2
        world.report.truncate(3)
        assert world.rows() == []
        await lane.measure("during", 4, 5)
    assert [row["weight_version"] for row in world.rows()] == [5, 5]


async def test_a_score_that_is_good_enough_ends_the_run(world) -> None:
    data = {**DATASETS["greedy"], "stop_at_score": 0.3}
    lane = world.lane({"greedy": data}, every_steps=1)
    assert not lane.has_reached
    async with asyncio.timeout(PATIENCE):
        await lane.measure("before", 0, 3)
    assert lane.has_reached
    world.report.truncate(-1)
    assert not lane.has_reached, "the weights that earned it are gone"
    async with asyncio.timeout(PATIENCE):
        await lane.measure("before", 0, 3)
    again = world.lane({"greedy": data}, every_steps=1)
    world.report.truncate(0)
    assert again.has_reached, "a run that goes on knows what it measured"
    higher = world.lane({"greedy": {**data, "stop_at_score": 0.4}}, every_steps=1)
    async with asyncio.timeout(PATIENCE):
        await higher.measure("after", 0, 3)
    assert not higher.has_reached


async def test_tasks_that_failed_do_not_end_a_run_early(world) -> None:
    world.episodes.failing, world.episodes.failure = (
        {"eval-2-greedy-1": 9, "eval-2-greedy-2": 9},
        INVALID,
    )
    lane = world.lane({"greedy": {**DATASETS["greedy"], "stop_at_score": 0.5}}, every_steps=1)
    async with asyncio.timeout(PATIENCE):
        await lane.measure("during", 2, 3)
    assert (world.rows()[0]["score"], world.rows()[0]["failed_groups"]) == (1.0, 2)
    assert not lane.has_reached, "a third of the tasks is no half"
    world.report.truncate(2)
    assert not lane.has_reached


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2, "sampling": None, "pass_at": []}, "greedy"),
        ({"sampling": {"max_new_tokens": 9, "temperature": 0}}, r"datasets\.x\.samples: greedy"),
        ({"pass_at": [5]}, "1..4"),
        ({"samples": 0}, "samples"),
        ({"stop_at_score": 0.5}, r"datasets\.x\.stop_at_score: .* every_steps 0"),
    ],
)
def test_settings_without_effect_are_refused(world, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        world.lane({"x": {**DATASETS["sampled"], **changes}})
