"""Conversions that are killed, stopped, starved or fed what does not fit: whole, or nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice import faults
from sluice.weights.convert.conversion import Result, convert, locked_target, staging_of
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.verify import compare
from sluice.weights.convert.work import JOURNAL, Control, Journal
from sluice.weights.errors import (
    BusyTargetError,
    CancelledConversionError,
    ConflictingTensorError,
    DiskFullError,
    InvalidCheckpointError,
    MissingTensorError,
    TargetExistsError,
    UnexpectedTensorError,
)
from tests.patience import PATIENCE

TO_HF = ConvertOptions(to="hf", sync=False, max_file_bytes=60_000)
TO_MEGATRON = ConvertOptions(vocab_multiple=8, sync=False, max_file_bytes=60_000)
MULTIPLE = {"torch_dist": "8", "hf": "128"}  # as in the options above
CONVERTING = "tests.converter.converting"


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def run_killed(source: Path, target: Path, kind: str, point: str, passing: int) -> None:
    """A conversion in a process of its own that is killed at a point."""
    directory = target.parent / "faults" / "armed"  # whose lock lies beside it
    faults.arm(directory, point, passing)
    done = subprocess.run(
        [sys.executable, "-m", CONVERTING, str(source), str(target), kind, MULTIPLE[kind]],
        env={**os.environ, faults.VARIABLE: str(directory)},
        capture_output=True,
        timeout=PATIENCE,
    )
    shutil.rmtree(directory.parent)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("kind", "point", "passing"),
    [("torch_dist", "convert.group", 20), ("hf", "convert.group", 7), ("hf", "convert.whole", 1)],
)
def test_a_killed_conversion_goes_on(
    kind: str, point: str, passing: int, qwen3: Path, megatron: Path, tmp_path: Path
) -> None:
    source, options = (qwen3, TO_MEGATRON) if kind == "torch_dist" else (megatron, TO_HF)
    whole = convert(source, tmp_path / "whole", options)
    run_killed(source, tmp_path / "target", kind, point, passing)
    assert visible(tmp_path) == ["whole"]
    control = Control()
    resumed = convert(source, tmp_path / "target", options, control)
    assert resumed.digests == whole.digests
    assert control.progress.resumed_bytes > 0
    assert control.progress.done_bytes == control.progress.total_bytes == whole.size
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "target" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not staging_of(tmp_path / "target").exists()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_bytes_lost_in_a_crash_are_written_again(
    qwen3: Path, megatron: Path, tmp_path: Path
) -> None:
    """The journal may be on the disk before what it notes: its lines are checked."""
    run_killed(megatron, tmp_path / "target", "hf", "convert.whole", 1)
    for path in staging_of(tmp_path / "target").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-500:] = bytes(500)
        path.write_bytes(data)
    convert(megatron, tmp_path / "target", TO_HF)
    assert compare(qwen3, tmp_path / "target").same


def test_a_line_that_a_crash_cut_short_hides_none_that_follow(tmp_path: Path) -> None:
    """A conversion that is killed twice goes on from where it was the second time."""
    with Journal(tmp_path, "work") as journal:
        journal.add("first", {"a": "1"})
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"group": "second", "dig')
    with Journal(tmp_path, "work") as journal:
        assert set(journal.finished) == {"first"}
        journal.add("third", {"c": "3"})
    with Journal(tmp_path, "work") as journal:
        assert journal.finished == {"first": {"a": "1"}, "third": {"c": "3"}}
    with Journal(tmp_path, "other work") as journal:
        assert journal.finished == {}


def test_other_work_does_not_go_on_with_it(qwen3: Path, tmp_path: Path) -> None:
    run_killed(qwen3, tmp_path / "target", "torch_dist", "convert.group", 20)
    control = Control()
    convert(qwen3, tmp_path / "target", ConvertOptions(sync=False), control)
    assert control.progress.resumed_bytes == 0
    assert compare(qwen3, tmp_path / "target").same


def test_a_finished_conversion_is_not_done_again(qwen3: Path, tmp_path: Path) -> None:
    first = convert(qwen3, tmp_path / "target", TO_MEGATRON)
    control = Control()
    assert convert(qwen3, tmp_path / "target", TO_MEGATRON, control) == first
    assert control.progress.resumed_bytes == control.progress.total_bytes == first.size
    with pytest.raises(TargetExistsError):
        convert(qwen3, tmp_path / "target", ConvertOptions(sync=False))


@pytest.mark.parametrize("target", ["", "/"])
def test_a_target_without_a_name_exists_already(target: str, qwen3: Path) -> None:
    with pytest.raises(TargetExistsError, match="exists already"):
        convert(qwen3, Path(target), TO_MEGATRON)


@pytest.mark.parametrize("largest", [60_000, 5_000])  # of the latter some hold no tensor
def test_every_file_is_on_the_disk_before_the_target_appears(
    largest: int, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    after: set[int] = set()
    target, sync = tmp_path / "target", os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        (after if target.exists() else synced).add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    changes = {"sync": True, "max_file_bytes": largest}
    convert(qwen3, target, TO_MEGATRON.model_copy(update=changes))
    assert {path.stat().st_ino for path in (target, *target.iterdir())} <= synced
    assert after == {tmp_path.stat().st_ino}  # the target's own name


def test_a_source_of_the_same_size_is_another_source(qwen3: Path, tmp_path: Path) -> None:
    """Trained on in place: what is there of a conversion is not gone on with."""
    source = shutil.copytree(qwen3, tmp_path / "source")
    convert(source, tmp_path / "target", TO_MEGATRON)
    path = min(source.glob("*.safetensors"))
    size, tensors = path.stat().st_size, load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, {"format": "pt"})
    assert path.stat().st_size == size
    with pytest.raises(TargetExistsError):
        convert(source, tmp_path / "target", TO_MEGATRON)


def test_a_conversion_by_another_description_is_another(megatron: Path, tmp_path: Path) -> None:
    """The model's config may lie elsewhere; it decides what rows are whose."""
    model = tmp_path / "described"
    model.mkdir()
    shutil.copy(megatron / "config.json", model)
    options = ConvertOptions(to="hf", model=model, sync=False)
    convert(megatron, tmp_path / "target", options)
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace("{", '{"note": 1,', 1))
    with pytest.raises(TargetExistsError):
        convert(megatron, tmp_path / "target", options)


def test_a_stopped_conversion_leaves_nothing(qwen3: Path, tmp_path: Path) -> None:
    control = Control(stop=threading.Event())
    control.stop.set()
    with pytest.raises(CancelledConversionError):
        convert(qwen3, tmp_path / "target", TO_MEGATRON, control)
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_of_one_target(qwen3: Path, tmp_path: Path) -> None:
    with locked_target(tmp_path / "target"), pytest.raises(BusyTargetError, match="target"):
        convert(qwen3, tmp_path / "target", TO_MEGATRON)


def test_never_two_at_a_target_that_many_ask_for(tmp_path: Path) -> None:
    """Also in the moment in which the lock of the one before is removed."""
    inside, most = [], 0

    def ask() -> None:
        nonlocal most
        for _ in range(400):
            try:
                with locked_target(tmp_path / "target"):
                    inside.append(1)
                    most = max(most, len(inside))
                    time.sleep(0)
                    inside.pop()
            except BusyTargetError:
                pass

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_full_disk_is_named(qwen3: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DiskFullError, match="target"):
            convert(qwen3, tmp_path / "target", TO_MEGATRON)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []
    convert(qwen3, tmp_path / "target", TO_MEGATRON)
    assert compare(qwen3, tmp_path / "target").same


def test_what_cannot_be_removed_of_other_work_is_not_mixed_with(
    qwen3: Path, tmp_path: Path
) -> None:
    """A link in its place: what it leads to would have been written into."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    staging_of(tmp_path / "target").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        convert(qwen3, tmp_path / "target", TO_MEGATRON)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["mine"]


def resave(source: Path, target: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """A copy with tensors added, replaced, or left out where there is None."""
    shutil.copytree(source, target)
    tensors = {**load_file(source / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors")
    return target


def test_tensors_that_do_not_fit_are_named(qwen3: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    for number, (change, error) in enumerate(
        (
            ({name: None}, MissingTensorError),
            ({name: torch.zeros(3)}, InvalidCheckpointError),
            ({"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}, UnexpectedTensorError),
        )
    ):
        source = resave(qwen3, tmp_path / str(number), change)
        with pytest.raises(error, match=next(iter(change))):
            convert(source, tmp_path / "target", TO_MEGATRON)


def test_duplicates_must_be_equal(qwen3: Path, tmp_path: Path) -> None:
    """A tensor in two shards is accepted only when proven equal."""
    name = "model.norm.weight"
    tensors = load_file(qwen3 / "model.safetensors")
    for number, value in enumerate((tensors[name].clone(), tensors[name] + 1)):
        source = tmp_path / str(number)
        shutil.copytree(qwen3, source)
        (source / "model.safetensors").rename(source / "a.safetensors")
        save_file({name: value}, source / "b.safetensors")
        index = dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}
        text = json.dumps({"weight_map": index})
        (source / "model.safetensors.index.json").write_text(text)
    report = convert(tmp_path / "0", tmp_path / "made", TO_MEGATRON).report
    ghost = {"x": "named by the index, in no file"}
    assert report.skipped == {name: "stored twice, equal"} | ghost
    assert compare(qwen3, tmp_path / "made").same
    with pytest.raises(ConflictingTensorError, match=r"model\.norm\.weight"):
        convert(tmp_path / "1", tmp_path / "other", TO_MEGATRON)


def test_a_file_of_the_same_name_makes_no_other_format(qwen3: Path, tmp_path: Path) -> None:
    """Megatron's metadata.json; tools for HF checkpoints write some of their own."""
    source = resave(qwen3, tmp_path / "model", {})
    for number, text in enumerate(('{"author": "somebody"}', "[1]", "5", "no JSON")):
        (source / "metadata.json").write_text(text)
        convert(source, tmp_path / str(number), TO_MEGATRON)
        assert compare(qwen3, tmp_path / str(number)).same


def test_a_tied_copy_must_be_equal(tmp_path: Path) -> None:
    from tests.unit.weights_rules.models import save_model

    model = save_model("llama_tied", tmp_path / "model")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    same = resave(model, tmp_path / "same", {"lm_head.weight": embedding.clone()})
    result = convert(same, tmp_path / "made", TO_MEGATRON)
    assert result.report.skipped == {
        "lm_head.weight": "tied: equal to the tensor that was converted"
    }
    other = resave(model, tmp_path / "other", {"lm_head.weight": embedding + 1})
    for options in (TO_MEGATRON, TO_HF):
        with pytest.raises(ConflictingTensorError, match=r"embed_tokens.*lm_head"):
            convert(other, tmp_path / "target", options)


def test_memory_stays_at_buffers(qwen3: Path, tmp_path: Path) -> None:
    """A tensor of 64 MiB goes through without being in memory."""
    import psutil

    from tests.unit.weights_rules.models import CONFIGS

    config = {**CONFIGS["qwen3"], "vocab_size": 1 << 20, "hidden_size": 16, "model_type": "qwen3"}
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    from sluice.weights.convert.hf import read_config
    from sluice.weights.convert.plan import read_weights

    shapes = read_weights(read_config(source), source).hf_tensors()
    save_file(
        {name: torch.ones(shape) for name, shape in shapes.items()}, source / "model.safetensors"
    )
    convert(qwen3, tmp_path / "first", ConvertOptions(sync=False))  # loads what stays loaded
    process, control = psutil.Process(), Control()
    before = process.memory_info().rss
    peaks = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peaks.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result: Result = convert(source, tmp_path / "target", ConvertOptions(sync=False), control)
    finally:
        done.set()
        watcher.join()
    assert result.largest_group == 64 << 20
    assert max(peaks) - before < 32 << 20


def test_fp8_weights_and_scales_come_in_pairs(qwen3: Path, tmp_path: Path) -> None:
    """Blocks without scales are other numbers; so is a trained weight with scales of old."""
    convert(qwen3, tmp_path / "fp8", ConvertOptions(to="hf", quantize="fp8", sync=False))
    (tmp_path / "fp8/conversion.json").unlink()
    name = "model.layers.1.mlp.down_proj.weight"
    source = resave(tmp_path / "fp8", tmp_path / "lost", {name + "_scale_inv": None})
    with pytest.raises(MissingTensorError, match=f"{name}_scale_inv"):
        convert(source, tmp_path / "target", TO_MEGATRON)
    trained = load_file(qwen3 / "model.safetensors")[name]
    source = resave(tmp_path / "fp8", tmp_path / "stale", {name: trained})
    with pytest.raises(UnexpectedTensorError, match=f"{name}_scale_inv"):
        convert(source, tmp_path / "target", TO_MEGATRON)


def test_a_target_inside_of_its_source_is_no_other_source(qwen3: Path, tmp_path: Path) -> None:
    """Its lock, and where it grows, lie beside the files of the source."""
    source = tmp_path / "model"
    shutil.copytree(qwen3, source)
    made = convert(source, source / "made", TO_MEGATRON)
    assert convert(source, source / "made", TO_MEGATRON) == made
    with locked_target(source / "other"):
        assert convert(source, source / "made", TO_MEGATRON) == made
