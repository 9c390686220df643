"""Runs that go on: what they need, what they find damaged, what they refuse."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from sluice.loop.journal import read_journal
from sluice.loop.ledger import Ledger
from sluice.loop.run_directory import (
    latest_run_checkpoint,
    list_run_checkpoints,
    write_run_checkpoint,
)
from sluice.samples.blob_store import BlobStore
from sluice.weights.store import WeightStore
from tests.e2e.conftest import Stack, Training
from tests.patience import PATIENCE

ONE = {"tensor": 1, "pipeline": 1, "expert": 1, "virtual_pipeline": 1}


def checkpoint_of(stack: Stack, training: Training) -> Path:
    """The directory of the newest one."""
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    assert run_checkpoint is not None
    return stack.run_dir / "store" / run_checkpoint.checkpoint


def run_id_of(training: Training) -> str:
    return Ledger(training.run_dir / "ledger.sqlite").run_id


def pinned_by(weights: WeightStore, owner: str) -> set[int]:
    return {version for version, owners in weights.pins().items() if owner in owners}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)


def test_blobs_that_are_gone_or_damaged_are_generated_again(stack):
    training = stack.train("damaged", steps=5, dies_at=("consumed", 3))
    training.died()
    run_checkpoint = latest_run_checkpoint(training.run_dir / "cuts")
    groups = [g for g in training.groups("consumed") if g.consumed_step > run_checkpoint.step]
    groups += training.groups("generated")
    assert len(groups) >= 4  # they are to be trained on again
    blobs = stack.run_dir / "store" / "blobs"
    gone, damaged = (blobs / g.blob.digest for g in groups[:2])
    gone.unlink()
    content = bytes(BlobStore(stack.run_dir / "store").get(groups[1].blob))
    damaged.unlink()  # its file may be another's too
    damaged.write_bytes(b"\0" + content[1:])
    output = stack.train("damaged", steps=5, resume=True).finish()
    assert "is gone" in output  # found when the run came back
    assert "is lost" in output  # found by the trainer
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(20)}


def test_a_copy_of_a_run_takes_nothing_from_the_run_that_it_is_of(stack):
    """Both have one name in the store, and would remove each other's checkpoints."""
    training = stack.train("branched", steps=3, checkpoint_every=1)
    training.finish()
    (stack.run_dir / "runs/elsewhere").mkdir()
    shutil.copytree(training.run_dir, stack.run_dir / "runs/elsewhere/branched")
    copied = stack.train("elsewhere/branched", steps=6, checkpoint_every=1, resume=True)
    assert f"is a copy of {training.run_dir}, and another run" in copied.finish()
    assert checkpoint_of(stack, training).is_dir()
    stack.train("branched", steps=7, checkpoint_every=1, resume=True).finish()
    weights, own = WeightStore(stack.run_dir / "store/weights"), f"run/{run_id_of(copied)}"
    for version in pinned_by(weights, own):  # as of a copy whose first start ended too soon
        weights.unpin(version, own)
    again = stack.train("elsewhere/branched", steps=7, checkpoint_every=1, resume=True).finish()
    assert "is a copy of" not in again
    kept = list_run_checkpoints(copied.run_dir / "cuts")[-2:]
    assert {each.weight_version for each in kept} <= pinned_by(weights, own)
    for each, steps in ((training, 7), (copied, 7)):
        consumed = {group.group_id: group.consumed_step for group in each.groups("consumed")}
        assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(4 * steps)}
    ids = {run_id_of(each) for each in (training, copied)}
    assert len(ids) == 2
    names = [path.name for path in (stack.run_dir / "store/checkpoints").iterdir()]
    for each in ids:  # of each run those that its two run checkpoints name
        assert len([name for name in names if f"-{each}-" in name]) == 2


def test_a_run_whose_directory_was_renamed_is_the_same_run(stack):
    training = stack.train("to be renamed", steps=3, checkpoint_every=1)
    training.finish()
    run_id = Ledger(training.run_dir / "ledger.sqlite").run_id
    after = stack.run_dir / "runs/renamed since"
    training.run_dir.rename(after)
    output = stack.train("renamed since", steps=6, checkpoint_every=1, resume=True).finish()
    assert "is a copy of" not in output
    assert Ledger(after / "ledger.sqlite").run_id == run_id
    names = [path.name for path in (stack.run_dir / "store/checkpoints").iterdir()]
    own = [name for name in names if f"-{run_id}-" in name]
    assert len(own) == 2 and all(name.startswith("renamed-since-") for name in own)


def test_a_run_resumed_with_another_seed_is_refused(stack):
    stack.train("seeded", steps=1).finish()
    training = stack.train("seeded", steps=2, resume=True, seed=7)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2
    assert "seed: is 7, the run to resume has 0" in output


def test_a_restart_policy_may_always_say_resume(stack):
    output = stack.train("always", steps=1, resume=True).finish()
    assert "holds no run yet" in output
    training = stack.train("always", steps=2, resume=True)
    assert "holds no run yet" not in training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2]


def test_a_run_that_is_finished_is_left_as_it_is(stack):
    """Its weights were published once more, and its data sets evaluated."""
    training = stack.train("over", steps=2, stop_at_reward=2.0)
    training.finish()
    before = {path: path.stat().st_mtime_ns for path in training.run_dir.rglob("*.jsonl")}
    versions = stack.run_dir / "store" / "weights" / "versions"
    published = sorted(path.name for path in versions.iterdir())
    for _ in range(2):
        told = stack.train("over", steps=2, stop_at_reward=2.0, resume=True).finish()
        assert "over: the run is finished, at step 2, and nothing is done again" in told
    assert before == {path: path.stat().st_mtime_ns for path in training.run_dir.rglob("*.jsonl")}
    assert published == sorted(path.name for path in versions.iterdir())
    again = stack.train("over", steps=2, stop_at_reward=3.0, resume=True).finish()
    assert "the run is at its end already (step 2)" in again, "it was asked for something else"
    assert "is finished" not in stack.train("over", steps=3, resume=True).finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3]


def test_a_finished_run_can_go_on_from_its_last_step(stack):
    stack.train("longer", steps=3, checkpoint_every=2).finish()
    training = stack.train("longer", steps=4, checkpoint_every=2, resume=True)
    training.finish()
    assert latest_run_checkpoint(training.run_dir / "cuts").step == 4
    rewards = [row["reward_mean"] for row in training.rows()]
    assert len(rewards) == 4
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(16)}


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(stack):
    training = stack.train("flipped", steps=4, checkpoint_every=2)
    training.finish()
    flip(checkpoint_of(stack, training) / "optimizer.safetensors")
    training = stack.train("flipped", steps=5, checkpoint_every=2, resume=True)
    output = " ".join(training.finish().split())
    assert "run checkpoint of step 4 is damaged" in output
    assert "optimizer.safetensors" in output
    assert "went back to the run checkpoint of step 2: steps 3 to 4 are repeated" in output
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5]
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(20)}
    assert latest_run_checkpoint(training.run_dir / "cuts").step == 5
    assert len(list((training.run_dir / "cuts").glob("*.damaged"))) == 1


def test_a_run_of_which_every_checkpoint_is_damaged_is_left_as_it_is(stack):
    training = stack.train("hopeless", steps=4, checkpoint_every=2)
    training.finish()
    cuts = training.run_dir / "cuts"
    oldest = cuts / "00000002.json"
    oldest.write_bytes(oldest.read_bytes()[:-5])
    newest = checkpoint_of(stack, training) / "optimizer.safetensors"
    intact = newest.read_bytes()
    flip(newest)
    before = {path.name: path.read_bytes() for path in cuts.iterdir()}
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}

    refused = stack.train("hopeless", steps=5, resume=True)
    output, _ = refused.process.communicate(timeout=PATIENCE)
    assert refused.process.returncode == 2
    (line,) = (each for each in output.splitlines() if each.startswith("sluice: "))
    assert f"no run checkpoint in {cuts} is intact; the newest, of step 4: " in line
    assert "optimizer.safetensors" in line
    assert "Traceback" not in output
    assert {path.name: path.read_bytes() for path in cuts.iterdir()} == before
    assert {g.group_id: g.consumed_step for g in training.groups("consumed")} == consumed

    newest.write_bytes(intact)  # put back from a copy
    training = stack.train("hopeless", steps=5, resume=True)
    training.finish()
    assert [row["step"] for row in training.rows()] == [1, 2, 3, 4, 5]


def test_weights_that_are_not_those_of_the_run_checkpoint_are_no_place_to_go_on_from(stack):
    """Checkpoints of earlier releases have no digests; the weights published from them have."""
    training = stack.train("undigested", steps=2, checkpoint_every=2)
    training.finish()
    directory = checkpoint_of(stack, training)
    record = json.loads((directory / "checkpoint.json").read_text())
    del record["record_digest"], record["files"]
    (directory / "checkpoint.json").write_text(json.dumps({**record, "format": 1}))
    flip(directory / "policy.safetensors")
    training = stack.train("undigested", steps=3, resume=True, checkpoint_every=2)
    output = " ".join(training.finish().split())
    assert "run checkpoint of step 2 is damaged" in output
    assert "restores other weights than version" in output
    assert "went back to the run checkpoint of step 0: steps 1 to 2 are repeated" in output
    consumed = {group.group_id: group.consumed_step for group in training.groups("consumed")}
    assert consumed == {f"g{i:07}": i // 4 + 1 for i in range(12)}


def test_groups_of_weights_that_never_come_again_are_sampled_again(stack):
    """With other settings they are of another policy, however close its step is."""
    died = stack.train("other", steps=3, checkpoint_every=9, dies_at=("consumed", 3))
    died.died()
    first = {group.group_id: group.blob for group in died.groups("consumed")}
    more = stack.train(
        "other",
        steps=3,
        resume=True,
        checkpoint_every=9,
        dies_at=("consumed", 2),
        algorithm={"epochs": 4},
    )
    more.died()
    training = stack.train("other", steps=3, resume=True, checkpoint_every=9)
    output = " ".join(training.finish().split())
    assert "resumed with another algorithm (algorithm.epochs: 4, now 1)" in output
    told = "groups are sampled again, which had been by weights after step 0 with the settings"
    notes = [each["text"] for each in read_journal(died.run_dir) if each["event"] == "note"]
    assert [text.split()[0] for text in notes if told in text] == ["8", "4"]
    assert [row["step"] for row in training.rows()] == [1, 2, 3]
    for row in training.learning_rows():
        assert row["rollout_mismatch"] < 1e-5, "sampled by other weights, which none corrects"
    last = {group.group_id: group.blob for group in training.groups("consumed")}
    assert {name for name, blob in last.items() if blob == first[name]} == {
        f"g{number:07}" for number in range(4)
    }


def test_a_manifest_cut_off_smaller_steps_and_other_ranks(stack):
    stack.train("smaller", steps=2, checkpoint_every=2).finish()
    cuts = stack.run_dir / "runs" / "smaller" / "cuts"
    path = cuts / "00000002.json"
    path.write_bytes(path.read_bytes()[:-5])
    first = latest_run_checkpoint(cuts)
    assert first.step == 0 and first.layouts == {"trainer": {"data": 1, "context": 1, **ONE}}
    settings = first.trainers["trainer"]
    assert settings["optim.learning_rate"] == "0.002"
    engines = {**first.trainers["engines"], "dtype": '"bfloat16"'}
    other = {"trainer": {**settings, "optim.learning_rate": "0.5"}}
    write_run_checkpoint(cuts, replace(first, trainers=other))
    refused = stack.train("smaller", steps=9, resume=True, deterministic=True)
    output, _ = refused.process.communicate(timeout=PATIENCE)
    assert refused.process.returncode == 2
    assert "trainer of the run to resume had other settings (optim.learning_rate: 0.5" in output
    write_run_checkpoint(cuts, replace(first, trainers={**first.trainers, "engines": engines}))
    refused = stack.train("smaller", steps=9, resume=True, deterministic=True)
    output, _ = refused.process.communicate(timeout=PATIENCE)
    assert refused.process.returncode == 2
    assert 'the engines of the run to resume had other settings (dtype: "bfloat16"' in output
    other["engines"] = engines
    write_run_checkpoint(cuts, replace(first, trainers=other, layouts={"trainer": {"data": 2}}))
    refused = stack.train("smaller", steps=9, resume=True, deterministic=True)
    output, _ = refused.process.communicate(timeout=PATIENCE)
    assert refused.process.returncode == 2
    assert "Traceback" not in output
    assert "deterministic: the ranks of the run to resume were laid out otherwise" in output
    training = stack.train("smaller", steps=9, resume=True, groups_per_step=1)
    output = " ".join(training.finish().split())
    assert "resumed with another layout of ranks (trainer: data 2; now" in output
    assert "resumed with other settings of the trainer (optim.learning_rate: 0.5, now" in output
    assert 'resumed with other settings of the engines (dtype: "bfloat16", now' in output
    assert "run checkpoint of step 2 is damaged" in output
    assert [row["step"] for row in training.rows()] == list(range(1, 10))
    steps = [group.consumed_step for group in training.groups("consumed")]
    assert sorted(steps) == list(range(1, 10))  # what was rolled out for larger steps is stale
