"""The report of runs and the list of samples: what they show, and what hostile runs do to them."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sluice import cli
from sluice.config import ConfigError
from sluice.loop.config import TraceConfig
from sluice.loop.journal import RunJournal
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.metrics import ROW_KEYS
from sluice.loop.run_page.page import page_data, read_run, render_runs, tokenizer_of, write_run_page
from sluice.loop.run_samples import SampleKeeper, kept_files, load_samples, pieces_of
from sluice.samples.arrow import encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import MediaSpan, Sample, VersionSpan
from sluice.samples.tokenizer import TextTokenizer

MADE_HERE = {"tokens_per_second"}  # of a row's tokens and time
HOSTILE = "</script><script>alert(1)</script><!-- \0 \u202e \ud800 &amp; " + "x" * 5000


def a_sample(group: str, index: int, reward: float, **columns: Any) -> Sample:
    return Sample(
        sample_id=f"{group}/{index}",
        group_id=group,
        token_ids=np.array([4, 1, 7, 9, 3], dtype=np.int32),
        prompt_length=2,
        finish_reason="stop",
        columns={
            "reward": reward,
            "rollout_logprobs": np.array([-0.5, -1.0, -2.0], dtype=np.float32),
            **columns,
        },
        spans=(VersionSpan(version=3, digest="d", first_token=0, last_token=2),),
    )


def make_run(run_dir: Path, groups: int = 3, steps: int = 3, note: str = "") -> list[LedgerGroup]:
    """A run as a loop leaves it: metrics, journal, ledger, store; a group of two a step."""
    run_dir.mkdir(parents=True)
    store = BlobStore(run_dir / "store", sync=False)
    made = []
    for position in range(groups):
        name = f"g{position:04}"
        samples = [a_sample(name, 0, 1.0), a_sample(name, 1, math.nan if position == 1 else 0.0)]
        blob = store.put(encode_group(samples, {"answer": note or str(position)}))
        made.append(
            LedgerGroup(
                position=position,
                group_id=name,
                state="generated",
                issue_step=position,
                blob=blob,
                sample_count=2,
            )
        )
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.issue([(group.position, group.group_id) for group in made], 0)
    for group in made:
        ledger.generated(group)
        ledger.consume([group.group_id], group.position + 1)
    ledger.close()
    rows = [
        {"step": step, "reward_mean": 0.1 * step, "tokens": 10.0, "step_seconds": 2.0}
        | {"rollout_seconds": 1.0, "train_seconds": 0.5, "skipped": []}
        for step in range(1, steps + 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    RunJournal(run_dir).start("train", 9, {"seed": 0, "store": str(run_dir / "store")})
    return made


def data_of(*run_dirs: Path, samples: int = 100) -> dict[str, Any]:
    runs = [read_run(run_dir) for run_dir in run_dirs]
    return page_data(runs, tokenizer=None, samples=samples, beside=run_dirs[0])


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def sluice(*arguments: object) -> Done:
    """The command, in this process."""
    out, error = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        patch.setattr(sys, "argv", ["sluice", *map(str, arguments)])
        code = cli.main()
    return Done(code, out.getvalue(), error.getvalue())


def test_two_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", steps=3)
    make_run(tmp_path / "b" / "run", steps=5)
    RunJournal(tmp_path / "b" / "run").start("train", 9, {"seed": 1})
    RunJournal(tmp_path / "b" / "run").write("end", outcome="failed", step=5, text="no money")
    data = data_of(tmp_path / "a" / "run", tmp_path / "b" / "run")
    first, second = data["runs"]
    assert (first["name"], second["name"]) == ("a/run", "b/run")
    assert first["columns"]["reward_mean"] == [0.1, 0.2, 0.3]
    assert second["columns"]["tokens_per_second"] == [5.0] * 5
    assert second["summary"]["seconds"] == 10.0
    assert dict(second["phases"]) == {"rollout": 5.0, "train": 2.5, "other": 2.5}
    assert (second["state"], second["detail"]) == ("failed", "no money")
    assert ["seed", ["0", "1"]] in [list(each) for each in data["settings"]]
    assert [event[3] for event in data["events"]][-1] == "failed"
    assert len(data["samples"]) == 12
    assert len(data_of(tmp_path / "a" / "run", samples=4)["samples"]) == 4


def test_hostile_texts_stay_data(tmp_path: Path) -> None:
    run_dir = tmp_path / "<img src=x onerror=alert(1)>"
    make_run(run_dir, note=HOSTILE.replace("\ud800", ""))
    RunJournal(run_dir).write("note", step=1, text=HOSTILE)
    page = render_runs([read_run(run_dir)], tokenizer=None, samples=10, beside=tmp_path)
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert "<img src=x" not in page
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    start = page.index('type="application/json">') + len('type="application/json">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert data["events"][-1][4] == HOSTILE
    assert {sample[9]["answer"] for sample in data["samples"]} == {HOSTILE.replace("\ud800", "")}


def test_what_is_damaged_or_gone_is_left_out_and_said_and_nothing_changes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    groups = make_run(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward_mean": NaN, "step_seconds": Infinity}\n')
        file.write(f'{{"step": 5, "tokens": {10**400}}}\n{{"step": 6, "rew')
    blobs = [run_dir / "store" / "blobs" / g.blob.digest for g in groups]
    blobs[0].unlink()
    blobs[1].write_bytes(blobs[1].read_bytes()[:-1] + b"x")
    before = contents(tmp_path)
    data = data_of(run_dir)
    done = sluice("samples", run_dir)
    assert contents(tmp_path) == before
    assert data["runs"][0]["columns"]["reward_mean"] == [0.1, 0.2, 0.3, None]
    assert {sample[2] for sample in data["samples"]} == {"g0002"}
    said = "\n".join(data["warnings"])
    assert "1 groups are no longer in the store" in said
    assert "1 groups are damaged in the store" in said
    assert (done.returncode, done.stderr) == (0, "")
    assert "no longer in the store" in done.stdout


def test_a_journal_with_what_nobody_writes_costs_that_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run\udcff"
    make_run(run_dir)
    with (run_dir / "journal.jsonl").open("a") as journal:
        for time in (10**400, "NaN", 1e300, -1e18):
            journal.write(f'{{"event": "note", "time": {time}, "text": "never"}}\n')
        for key in ("store", "services", "tokenizer"):
            for path in ("\0", "a/" * 5000, "a" * 300 + "/x"):
                start = {"event": "start", "time": 1, "config": {key: path}}
                journal.write(json.dumps(start) + "\n")
    write_run_page([run_dir], tmp_path / "report.html", tokenizer=None, samples=10)
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    for line in lines[-9:]:
        (run_dir / "journal.jsonl").write_text(line + "\n")
        assert {event[1] for event in data_of(run_dir)["events"]} == {1}


def test_a_flipped_byte_of_a_ledger_never_ends_in_a_trace(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    path = run_dir / "ledger.sqlite"
    data = path.read_bytes()
    told = set()
    for index in range(0, len(data), 397):
        path.write_bytes(data[:index] + bytes([data[index] ^ 0x10]) + data[index + 1 :])
        page = data_of(run_dir)
        told |= {"said" for text in page["warnings"] if "ledger" in text}
        assert len(page["samples"]) <= 6
    assert told  # or the flips hit nothing
    path.write_bytes(data)
    database = sqlite3.connect(path)
    for trigger in ("groups_insert", "groups_update"):
        database.execute(f"DROP TRIGGER {trigger}")
    database.execute("UPDATE groups SET consumed_step = 9 WHERE position = 1")  # as a flip would
    database.commit()
    database.close()
    page = data_of(run_dir)
    assert "1 damaged rows" in " ".join(page["warnings"])
    assert {sample[2] for sample in page["samples"]} == {"g0000", "g0002"}
    path.write_bytes(b"not a database")
    assert "cannot be read" in " ".join(data_of(run_dir)["warnings"])
    path.write_bytes(data[: len(data) // 2])
    data_of(run_dir)


@pytest.mark.parametrize("command", ["report", "samples"])
def test_what_is_no_run_is_said_in_a_line(tmp_path: Path, command: str) -> None:
    for target in (tmp_path, tmp_path / "missing", "x" * 5000):
        done = sluice(command, target)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="is no run directory"):
        read_run(Path("a\0b"))


def test_kept_samples_have_what_the_trainer_knew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    groups = make_run(run_dir)
    config = TraceConfig(steps=2, samples_every=2, samples_per_step=4)
    keeper = SampleKeeper(run_dir, run_dir / "store", config)
    assert keeper.choose(2, groups) == ()
    chosen = keeper.choose(1, groups)
    assert [group.group_id for group in chosen] == ["g0000", "g0001"]  # the third has no room
    known = {
        f"{group.group_id}/{i}": {
            "advantages": np.array([1.0, -1.0, 0.5], dtype=np.float32),
            "old_logprobs": np.array([-0.25, -1.0, -3.0], dtype=np.float32),
        }
        for group in chosen
        for i in range(2)
    }
    for step in (1, 3, 5):
        keeper.keep(step, chosen, known)
    assert [path.name[:7] for path in kept_files(run_dir / "samples")] == ["0000003", "0000005"]
    keeper.keep(3, chosen, known)  # the run went back
    assert [path.name[:7] for path in kept_files(run_dir / "samples")] == ["0000003"]
    shutil.rmtree(run_dir / "store")
    warnings: list[str] = []
    seen = list(load_samples(run_dir, run_dir / "store", None, warnings.append))
    assert [each.step for each in seen] == [3] * 4
    assert seen[0].advantage == pytest.approx(0.5 / 3)
    assert seen[0].mismatch.tolist() == [0.25, 0.0, -1.0]
    row = data_of(run_dir)["samples"][0]
    assert row[10:13] == [[1.0, -1.0, 0.5], [0.25, 0.0, -1.0], [-0.5, -1.0, -2.0]]
    (path,) = kept_files(run_dir / "samples")
    data = path.read_bytes()
    for index in range(0, len(data), 101):
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        warnings = []
        assert list(load_samples(run_dir, run_dir / "store", None, warnings.append)) == []
        assert "damaged" in warnings[0]
    keeper.keep(7, [groups[0]], {})  # its blob is gone: said in the log, and the run goes on
    assert path in kept_files(run_dir / "samples")


def test_samples_are_filtered_and_exported(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    for name, flags, count in (
        ("all.parquet", [], 6),
        ("good.parquet", ["--min_reward", "0.5"], 3),
        ("zero.jsonl", ["--max_reward", "0.5"], 2),  # NaN is within no bounds
        ("one.parquet", ["--steps", "2"], 2),
        ("two.jsonl", ["--steps", "2-3", "--group", "g0002"], 2),
        ("first.jsonl", ["--limit", "1"], 1),
        ("text.jsonl", ["--contains", "7 9 3"], 6),
        ("none.parquet", ["--finish_reason", "length"], 0),
    ):
        path = tmp_path / name
        done = sluice("samples", run_dir, "-o", path, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].endswith(f"{count} samples")
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == count
        if rows:
            assert rows[0]["token_ids"] == [4, 1, 7, 9, 3]
            assert rows[0]["response"] == "7 9 3 "
            assert rows[0]["rollout_logprobs"] == [-0.5, -1.0, -2.0]
            assert rows[0]["advantages"] is None
            assert rows[0]["weight_versions"] == [3]
    for limit in ("0", "1" + "0" * 30):
        done = sluice("samples", run_dir, "--limit", limit)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    for flags in (["-o", tmp_path / "a.csv"], ["-o"], ["--steps", "x"]):
        done = sluice("samples", run_dir, *flags)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_limit_from_the_environment_limits_an_export_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "some.jsonl"
    make_run(run_dir)
    monkeypatch.setenv("SLUICE_LIMIT", "2")
    done = sluice("samples", run_dir, "-o", path)
    assert done.stdout.splitlines()[-1].endswith("2 samples"), done.stderr
    assert len(path.read_text().splitlines()) == 2


def test_no_sample_that_fits_is_told_with_the_steps_there_are(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    done = sluice("samples", run_dir, "--steps", "400")
    assert done.stdout.splitlines() == [
        "no tokenizer is there any more; give --tokenizer to see texts",
        "no sample fits; the run has 3 steps",
        "0 samples",
    ]
    done = sluice("samples", run_dir, "--steps", "3-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ends before it begins" in done.stderr
    done = sluice("samples", run_dir, "-o", tmp_path / "no" / "such.parquet")
    assert done.stderr.endswith("such.parquet: No such file or directory\n")


def test_exported_lines_are_json_where_a_reward_is_not_finite(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir)
    path = tmp_path / "all.jsonl"
    assert sluice("samples", run_dir, "-o", path).returncode == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = path.read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert sum(row["reward"] is None for row in rows) == 1


def test_an_image_is_in_the_page_or_said_to_be_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    make_run(run_dir, groups=0)
    store = BlobStore(run_dir / "store", sync=False)
    shown = store.put(b"\x89PNG of a kind")
    gone = BlobReference("0" * 32, 5)
    samples = []
    for index, blob in enumerate((shown, gone)):
        span = MediaSpan(
            digest=blob.digest,
            size=blob.size,
            kind="image",
            first_token=0,
            token_count=1,
            grid_thw=(1, 2, 2),
        )
        sample = a_sample("g0000", index, 1.0)
        samples.append(Sample(**{**sample.__dict__, "media": (span,)}))
    blob = store.put(encode_group(samples))
    group = LedgerGroup(
        position=0, group_id="g0000", state="generated", issue_step=0, blob=blob, sample_count=2
    )
    ledger = Ledger(run_dir / "ledger.sqlite")
    ledger.issue([(0, "g0000")], 0)
    ledger.generated(group)
    ledger.close()
    images = [row[14] for row in data_of(run_dir)["samples"]]
    assert images[0] == ["data:image/png;base64,iVBORyBvZiBhIGtpbmQ="]
    assert "no longer in the store" in images[1][0]


def test_a_tokenizer_that_is_gone_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert tokenizer_of(run, None) is None
    assert "give --tokenizer" in run.warnings[0]
    with pytest.raises(ConfigError, match="does not exist"):
        tokenizer_of(run, tmp_path)


def test_panels_are_of_metrics_that_rows_have(tmp_path: Path) -> None:
    """That of the KL asked for a name that nothing had, and stayed away."""
    make_run(tmp_path / "run")
    *panels, _ = data_of(tmp_path / "run")["panels"]  # the last is of everything else
    names = {name.removeprefix("held_out_") for _, panel in panels for name in panel}
    assert names - MADE_HERE <= ROW_KEYS.keys()
    assert len(names) > 20


@pytest.mark.parametrize("text", ["aé", "é", "aéa"])
def test_an_answer_that_ends_within_a_character_is_shown_as_its_reward_saw_it(tmp_path, text):
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(letters, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    ids = tokenizer.encode(text, special=False)
    for end in range(len(ids) + 1):
        pieces = pieces_of(tokenizer, np.array(ids[:end], np.int32))
        assert (len(pieces), "".join(pieces)) == (end, tokenizer.decode([ids[:end]])[0])
