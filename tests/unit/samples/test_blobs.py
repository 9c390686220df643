"""Blobs: by content, verified, and collected only when nobody names them."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.durable import DirectoryError
from sluice.samples.blob_store import (
    COMPACT_LINES,
    BlobStore,
    append,
    has_blob,
    pin_path,
    read_blob,
)
from sluice.samples.blobs import MAPPED_BYTES, BlobDigestError, BlobNotFoundError, BlobReference
from tests.open_files import open_below
from tests.patience import PATIENCE

NOW = -5.0  # a grace that spares nothing, not even what was put this moment


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, sync=False)


def path_of(store: BlobStore, reference: BlobReference) -> Path:
    return store.root / "blobs" / reference.digest


@settings(max_examples=30)
@given(content=st.binary(max_size=300))
def test_content_comes_back(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    store = BlobStore(tmp_path_factory.mktemp("blobs"), sync=False)
    reference = store.put(memoryview(content))
    assert store.get(reference) == content
    assert reference.size == len(content)
    assert BlobStore(store.root).put(content) == reference
    assert len(list(store.root.glob("blobs/" + "?" * 32))) == 1
    assert not list(store.root.glob("blobs/tmp/*"))


def test_damage_is_refused_and_healed_by_the_next_put(store: BlobStore) -> None:
    reference = store.put(b"content")
    path_of(store, reference).write_bytes(b"contemt")
    with pytest.raises(BlobDigestError) as failure:
        store.get(reference)
    assert failure.value.expected == reference.digest
    path_of(store, reference).write_bytes(b"")
    with pytest.raises(BlobDigestError):
        store.get(reference)
    assert store.get(store.put(b"content")) == b"content"


@pytest.mark.parametrize("size", [MAPPED_BYTES, MAPPED_BYTES + 1])
def test_read_and_mapped_blobs_are_checked_and_outlive_their_files(
    store: BlobStore, size: int
) -> None:
    content = os.urandom(size)
    reference = store.put(content)
    view = store.get(reference)
    path_of(store, reference).unlink()
    assert view == content
    assert isinstance(view.obj, bytes) == (size <= MAPPED_BYTES)
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        path_of(store, reference).write_bytes(damaged)
        with pytest.raises(BlobDigestError):
            store.get(reference)


@settings(max_examples=30)
@given(contents=st.lists(st.binary(max_size=200), max_size=8), kept=st.integers(0, 255))
def test_contents_put_together_are_blobs_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], kept: int
) -> None:
    store = BlobStore(tmp_path_factory.mktemp("blobs"), sync=False)
    references = store.put_all(contents)
    large = os.urandom(2 * MAPPED_BYTES)
    first, second = store.put_all([large, large[::-1]])
    assert [bytes(store.get(each)) for each in references] == contents
    assert references == [store.put(each) for each in contents]
    for reference, content in zip(references, contents, strict=True):
        with store.open(reference) as file:
            assert (file.size, file.read(0, 1 << 20)) == (len(content), content)
            assert file.read(1, 3) == content[1:4]
    names = {each.digest for each in references}
    files = {path_of(store, each).stat().st_ino for each in references}
    assert len(files) == min(1, len(names))
    pinned = {name for index, name in enumerate(sorted(names)) if kept >> index & 1}
    store.pin("owner", [*pinned, first.digest])
    assert set(store.collect(NOW)) == (names - pinned) | {second.digest}
    for reference, content in zip(references, contents, strict=True):
        assert store.exists(reference) is (reference.digest in pinned)
        if reference.digest in pinned:
            assert store.get(reference) == content
    assert store.get(first) == large
    assert not list(store.root.glob("blobs/tmp/*"))


def test_no_damage_to_a_shared_file_is_read_as_content(store: BlobStore) -> None:
    contents = [b"first", b"", b"x" * 300]
    references = store.put_all(contents)
    path = path_of(store, references[0])
    whole = path.read_bytes()
    changes = [whole[:size] for size in range(len(whole))]
    changes += [
        whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in (1, 0x80)
    ]
    refused = 0
    for changed in changes:
        path.write_bytes(changed)
        with store.reads() as reads:
            for reference, content in zip(references, contents, strict=True):
                for get in (store.get, reads.get):
                    try:
                        assert get(reference) == content
                    except BlobDigestError:
                        refused += 1
    assert refused > 2 * len(whole)
    path.write_bytes(whole[:-1])
    assert store.put_all(contents) == references
    assert [bytes(store.get(each)) for each in references] == contents


def test_who_reads_many_looks_for_a_shared_file_once(store: BlobStore) -> None:
    contents = [b"first", b"", b"x" * 300]
    references = store.put_all(contents)
    alone = store.put(b"alone")
    for reference in references[1:]:
        path_of(store, reference).unlink()
    held = open_below(store.root)
    with store.reads() as reads:
        assert [bytes(reads.get(each)) for each in references] == contents
        assert reads.get(alone) == b"alone"
        with pytest.raises(BlobNotFoundError) as failure:
            reads.get(references[1])
        assert failure.value.digest == references[1].digest
        assert reads.open(references[0]).read(1, 3) == b"irs"
    assert open_below(store.root) == held


def test_a_blob_stored_again_is_read_where_a_shared_file_is_damaged(store: BlobStore) -> None:
    first, second = store.put_all([b"first", b"second"])
    path_of(store, second).unlink()
    assert store.put(b"second") == second
    path = path_of(store, first)
    path.write_bytes(path.read_bytes().replace(b"second", b"decond"))
    with store.reads() as reads:
        assert [bytes(reads.get(each)) for each in (first, second)] == [b"first", b"second"]


def test_where_files_have_one_name_each_blob_has_a_file(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    contents = [b"one", b"", b"two" * 100]
    references = store.put_all(contents)
    assert [bytes(store.get(each)) for each in references] == contents
    assert [path_of(store, each).stat().st_size for each in references] == [3, 0, 300]
    assert not list(store.root.glob("blobs/tmp/*"))


def test_a_view_outlives_its_blob(store: BlobStore) -> None:
    reference = store.put(b"content")
    view = store.get(reference)
    assert store.collect(NOW) == [reference.digest]
    assert view == b"content"
    with pytest.raises(BlobNotFoundError):
        store.get(reference)


@pytest.mark.parametrize("digest", ["0" * 32, "short", "../../../etc/passwd", "A" * 32])
def test_what_is_not_there_is_a_typed_error(store: BlobStore, digest: str) -> None:
    with pytest.raises(BlobNotFoundError):
        store.get(BlobReference(digest, 1))
    with pytest.raises(BlobNotFoundError):
        store.pin("x", [store.put(b"there").digest, digest])
    assert store.pinned("x") == set()


def test_malformed_digests_never_reach_a_pin_file(store: BlobStore) -> None:
    reference = store.put(b"a")
    store.pin("x", [reference.digest])
    with pytest.raises(BlobNotFoundError):
        store.unpin("x", ["short"])
    assert store.pinned("x") == {reference.digest}
    with pytest.raises(ValueError, match="owner"):
        store.pin("", [reference.digest])


def test_the_collector_spares_the_named_and_the_young(store: BlobStore) -> None:
    old, young, pinned, extra = (store.put(text) for text in (b"o", b"y", b"p", b"e"))
    for reference in (old, pinned, extra):
        os.utime(path_of(store, reference), (time.time() - 100, time.time() - 100))
    store.pin("engine/0", [pinned.digest])
    assert store.collect(50, extra_live={extra.digest}) == [old.digest]
    assert store.collect(NOW, extra_live={extra.digest}) == [young.digest]


def test_a_put_makes_old_content_young(store: BlobStore) -> None:
    reference = store.put(b"again")
    os.utime(path_of(store, reference), (0, 0))
    store.put(b"again")
    assert store.collect(50) == []


def test_every_owner_must_let_go(store: BlobStore) -> None:
    reference = store.put(b"shared")
    owners = ["ledger", "batch/1", "batch/2", "..", "\u00e4 b"]
    for owner in owners:
        store.pin(owner, [reference.digest])
    assert sorted(store.owners()) == sorted(owners)
    store.pin("ledger", [reference.digest])  # a pin is no count
    for owner in owners:
        assert BlobStore(store.root).collect(NOW) == []
        if owner.startswith("batch"):
            store.unpin(owner)
        else:
            store.unpin(owner, [reference.digest])
    store.unpin("nobody")
    assert store.collect(NOW) == [reference.digest]


def test_long_histories_are_compacted(store: BlobStore) -> None:
    kept, passing = store.put(b"kept").digest, store.put(b"passing").digest
    store.pin("ledger", [kept])
    path = pin_path(store.root / "blob_pins", "ledger")
    for _ in range(COMPACT_LINES // 200 + 1):
        append(path, "+", [passing] * 100, sync=False)
        append(path, "-", [passing] * 100, sync=False)
    assert store.collect(NOW) == [passing]
    assert path.stat().st_size < 100
    assert store.pinned("ledger") == {kept}
    again = store.put(b"passing").digest
    store.pin("ledger", [again])
    assert BlobStore(store.root).collect(NOW) == []


def test_files_of_dead_writers_are_swept(store: BlobStore) -> None:
    dead, live = (store.root / "blobs" / "tmp" / name for name in ("dead", "live"))
    dead.touch()
    live.touch()
    os.utime(dead, (0, 0))
    store.collect(0)
    assert live.exists() and not dead.exists()


def test_a_full_disk_leaves_no_part_of_a_blob(store: BlobStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # longer files fail alike
    try:
        with pytest.raises(OSError, match="large"):
            store.put(b"x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in store.root.rglob("*") if path.is_file() and path.stat().st_size] == []
    assert store.get(store.put(b"x" * 200)) == b"x" * 200


@pytest.mark.parametrize("gone", ["blobs/tmp", "blobs", "blob_pins"])
def test_a_folder_that_somebody_removed_is_made_again(store: BlobStore, gone: str) -> None:
    store.put(b"first")
    shutil.rmtree(store.root / gone)
    again = store.put(b"first")
    assert store.get(again) == b"first"
    store.pin("owner", [again.digest])
    assert store.collect(NOW) == []


def test_blobs_that_an_earlier_release_put_in_folders_are_found(store: BlobStore) -> None:
    first, second, third = (store.put(content) for content in (b"first", b"second", b"third"))
    for reference in (first, second, third):
        former = store.root / "blobs" / reference.digest[:2]
        former.mkdir(exist_ok=True)
        path_of(store, reference).rename(former / reference.digest)
    assert store.get(first) == read_blob(store.root, first) == b"first"
    assert store.exists(second) and has_blob(store.root, second)
    store.pin("owner", [first.digest])
    assert store.put(b"first") == first and not path_of(store, first).exists()
    former = store.root / "blobs" / second.digest[:2] / second.digest
    former.write_bytes(b"damaged")
    assert store.get(store.put(b"second")) == b"second"
    assert set(store.collect(NOW)) == {second.digest, third.digest}
    assert not former.exists() and not store.exists(second)
    assert store.get(first) == b"first"


@pytest.mark.parametrize("place", ["{file}/store", "/proc/store", "/sys/store"])
def test_a_store_that_cannot_be_made_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    root = place.format(file=tmp_path / "file")
    with pytest.raises(DirectoryError, match=f"^store: {root}: "):
        BlobStore(root)


@pytest.mark.parametrize("service", ["trainer", "rollout"])
def test_a_service_whose_store_cannot_be_made_ends_with_one_line(
    tmp_path: Path, service: str
) -> None:
    """A user reads which setting it is, and no trace."""
    (tmp_path / "file").touch()
    model = str(build_tiny_qwen3(tmp_path / "model", 0))
    values: dict[str, object] = {
        "trainer": {"model": model},
        "rollout": {"roles": ["episodes"], "router": "127.0.0.1:9", "tokenizer": model},
    }[service]
    file = tmp_path / "service.yaml"
    file.write_text(json.dumps({**values, "store": str(tmp_path / "file" / "store")}))
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("store: Not a directory")
    assert "Traceback" not in ended.stderr


def test_a_store_that_is_gone_is_named_and_not_made_again(store: BlobStore) -> None:
    """It may be a file system that is not mounted: what is written below would be hidden later."""
    shutil.rmtree(store.root)
    with pytest.raises(FileNotFoundError) as caught:
        store.put(b"x")
    assert str(store.root) in str(caught.value)
    assert not store.root.exists()


@pytest.mark.parametrize("room", [0, 10, 100])
def test_a_full_disk_is_told_with_the_file(store: BlobStore, room: int) -> None:
    pinned = store.put(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="large") as caught:
            store.put(b"x" * 200)
        assert str(caught.value.filename).startswith(str(store.root / "blobs"))
        if room < 34:
            with pytest.raises(OSError, match="large") as caught:
                store.pin("owner", [pinned.digest])
            assert caught.value.filename == str(store.root / "blob_pins" / "owner.owner")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.pin("owner", [pinned.digest])
    assert store.pinned("owner") == {pinned.digest}


def test_a_damaged_line_of_pins_costs_that_pin_and_no_other(store: BlobStore) -> None:
    digests = [store.put(bytes([number])).digest for number in range(4)]
    store.pin("owner", digests)
    path = pin_path(store.root / "blob_pins", "owner")
    data = path.read_bytes()
    for index in range(0, len(data), 3):
        for bit in (0x80, 0x10, 0x01):
            path.write_bytes(data[:index] + bytes([data[index] ^ bit]) + data[index + 1 :])
            left = store.pinned("owner")
            hit = index // 34  # the first line is no pin
            assert left >= {d for number, d in enumerate(digests, 1) if number != hit}
            assert len(left) >= 3
            store.collect(3600)
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        assert store.pinned("owner") == set(digests[: max(0, size // 34 - 1)])


def test_a_synced_store_behaves_alike(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    reference = store.put(b"x")
    assert store.put(b"x") == reference
    store.pin("a", [reference.digest])
    assert store.collect(NOW) == []
    store.unpin("a")
    assert store.collect(NOW) == [reference.digest]


class Pins(RuleBasedStateMachine):
    """Against a dict: what is pinned stays, what nobody names goes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.directories.mktemp("pins")
        self.store = BlobStore(self.root, sync=False)
        self.digests: dict[int, str] = {}
        self.pins: dict[str, set[str]] = {}

    directories: pytest.TempPathFactory

    @rule(content=st.integers(0, 4), owner=st.sampled_from("ab"))
    def put_and_pin(self, content: int, owner: str) -> None:
        digest = self.store.put(b"%d" % content).digest
        self.store.pin(owner, [digest])
        self.digests[content] = digest
        self.pins.setdefault(owner, set()).add(digest)

    @rule(content=st.integers(0, 4), owner=st.sampled_from("ab"))
    def unpin(self, content: int, owner: str) -> None:
        if digest := self.digests.get(content):
            self.store.unpin(owner, [digest])
            self.pins.get(owner, set()).discard(digest)

    @rule(owner=st.sampled_from("ab"))
    def unpin_all(self, owner: str) -> None:
        self.store.unpin(owner)
        self.pins.pop(owner, None)

    @rule()
    def collect(self) -> None:
        self.store.collect(NOW)
        found = {path.name for path in self.root.glob("blobs/" + "?" * 32)}
        assert found == set().union(*self.pins.values())

    @rule()
    def reopen(self) -> None:
        self.store = BlobStore(self.root, sync=False)

    @invariant()
    def pinned_blobs_are_there(self) -> None:
        for owner in "ab":
            assert self.store.pinned(owner) == self.pins.get(owner, set())
            for digest in self.pins.get(owner, ()):
                assert self.store.exists(BlobReference(digest, 0))


def test_pins_follow_their_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    Pins.directories = tmp_path_factory
    machine = Pins.TestCase()
    machine.settings = settings(max_examples=20, stateful_step_count=20)
    machine.runTest()
