"""What of a store is left when the machine goes down: what was synced, and nothing else."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.samples.blob_store import BlobStore
from tests.durable_disk import DurableDisk
from tests.open_files import open_below


def contents_of(data: bytes) -> dict[str, bytes]:
    """By digest, what a file holds: alone, or as the table at its end says."""
    found = {digest(data): data}
    if data.endswith(b"\x89sluice\n"):
        count = int.from_bytes(data[-16:-8], "little")
        for end in range(len(data) - 16, len(data) - 16 - 32 * count, -32):
            entry = data[end - 32 : end]
            first, size = (int.from_bytes(entry[at : at + 8], "little") for at in (16, 24))
            found[entry[:16].hex()] = data[first : first + size]
    return found


class Disk(DurableDisk):
    """Of a store of blobs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sizes_at_first_sync: list[int] = []

    def sync(self, descriptor: int) -> None:
        if not self.file_syncs and stat.S_ISREG(os.fstat(descriptor).st_mode):
            drafts = self.root.glob("blobs/tmp/*")
            self.sizes_at_first_sync = [each.stat().st_size for each in drafts]
        super().sync(descriptor)

    def check(self) -> None:
        """No name of a blob is seen, today or after a crash, before its content is durable."""
        for path in self.root.glob("blobs/" + "?" * 32):
            content = self.contents.get(path.stat().st_ino)
            assert content is not None, f"{path.name} has its name before its content is durable"
            assert digest(contents_of(content)[path.name]) == path.name

    def survivors(self) -> dict[str, bytes]:
        """Blobs by digest."""
        return {
            name: contents_of(self.contents[inode])[name]
            for name, inode in self.entries("blobs").items()
            if len(name) == 32 and inode in self.contents
        }


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    disk = Disk(root)
    with disk.in_use():
        yield disk


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


CONTENTS = st.binary(min_size=1, max_size=3)


@settings(max_examples=60)
@given(batches=st.lists(st.lists(CONTENTS, max_size=8), max_size=4))
def test_what_put_all_has_returned_outlives_the_machine(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[bytes]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    with watched(root) as disk:
        store, promised = BlobStore(root), dict[str, bytes]()
        for batch in batches:
            references = store.put_all(iter(batch))
            assert [reference.digest for reference in references] == list(map(digest, batch))
            promised |= {digest(content): content for content in batch}
            disk.check()
            survivors = disk.survivors()
            assert {name: survivors.get(name) for name in promised} == promised
    assert not list(root.glob("blobs/tmp/*"))


class SharedDisk(Disk):
    """On which another process, which is gone, has given names before it came to `fsync`."""

    def check(self) -> None:
        pass


def test_content_that_another_process_did_not_come_to_sync_is_durable_when_put_again(
    tmp_path: Path,
) -> None:
    disk = SharedDisk(tmp_path)
    with disk.in_use():
        store = BlobStore(tmp_path)
        BlobStore(tmp_path, sync=False).put(b"content")
        assert disk.survivors() == {}
        store.put(b"content")
        assert disk.survivors() == {digest(b"content"): b"content"}


def test_a_pin_and_its_end_outlive_the_machine(tmp_path: Path) -> None:
    with watched(tmp_path) as disk:
        store = BlobStore(tmp_path)
        names = [store.put(content).digest for content in (b"one", b"two")]

        def pinned() -> set[str]:
            left = tmp_path / "left"
            for name, inode in disk.entries("blob_pins").items():
                (left / "blob_pins").mkdir(parents=True, exist_ok=True)
                (left / "blob_pins" / name).write_bytes(disk.contents.get(inode, b""))
            return BlobStore(left, sync=False).pinned("owner")

        for name in names:
            store.pin("owner", [name])
        assert pinned() == set(names)
        store.unpin("owner", names[:1])
        assert pinned() == set(names[1:])


def test_the_disk_of_the_test_forgets_what_nobody_synced(tmp_path: Path) -> None:
    """A control: it is not so that all is found again."""
    with watched(tmp_path) as disk:
        BlobStore(tmp_path, sync=False).put(b"content")
        assert disk.survivors() == {}
        with pytest.raises(AssertionError, match="before its content"):
            disk.check()


def test_a_batch_waits_for_its_file_and_its_names_once(tmp_path: Path) -> None:
    contents = [b"%d" % number for number in range(100)]
    with watched(tmp_path) as disk:
        store = BlobStore(tmp_path)
        disk.folder_syncs = 0
        store.put_all(contents)
        assert disk.file_syncs == 1
        assert disk.folder_syncs == 1
        (size,) = disk.sizes_at_first_sync
        assert size > sum(map(len, contents))


def test_content_that_comes_twice_is_written_once(tmp_path: Path) -> None:
    with watched(tmp_path) as disk:
        store = BlobStore(tmp_path)
        first, again, other = store.put_all([b"one", b"one", b"two"])
        assert first == again and first != other
        assert disk.file_syncs == 1
    assert len(contents_of((tmp_path / "blobs" / first.digest).read_bytes())) == 3
    assert bytes(store.get(again)) == b"one"


def test_a_batch_that_does_not_fit_is_told_with_the_file_and_leaves_no_draft(
    tmp_path: Path,
) -> None:
    store = BlobStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="large") as caught:
            store.put_all([b"small", b"x" * 200, b"behind"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "blobs" / "tmp") in str(caught.value.filename)
    assert not list(tmp_path.glob("blobs/tmp/*"))
    assert open_below(tmp_path) == []
    contents = [b"small", b"x" * 200, b"behind"]
    assert [bytes(store.get(each)) for each in store.put_all(contents)] == contents


def test_content_that_cannot_be_made_leaves_no_draft(tmp_path: Path) -> None:
    def contents() -> Iterator[bytes]:
        yield b"one"
        raise ValueError("no second one")

    store = BlobStore(tmp_path)
    with pytest.raises(ValueError, match="second"):
        store.put_all(contents())
    assert not list(tmp_path.glob("blobs/tmp/*"))
    assert not list(tmp_path.glob("blobs/" + "?" * 32))


def test_an_error_of_the_disk_names_the_file_and_nothing_is_promised(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    calls = 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(5, os.strerror(5))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="blobs/tmp"):
            store.put_all([b"one", b"two", b"three"])
    assert not list(tmp_path.glob("blobs/" + "?" * 32))
    assert not list(tmp_path.glob("blobs/tmp/*"))
