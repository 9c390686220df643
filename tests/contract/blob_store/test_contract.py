"""What holds of blobs wherever they are."""

from __future__ import annotations

import os

import pytest

from sluice.samples.blobs import MAPPED_BYTES, BlobNotFoundError, BlobReference, Blobs
from tests.contract.blob_store.conftest import OpenBlobs

NOW = -60.0  # a grace that spares nothing, not even what was put this moment
LONG = 3600.0


@pytest.mark.parametrize("size", [0, 1, MAPPED_BYTES + 1, (8 << 20) + 3])
def test_content_comes_back_to_others(blobs: Blobs, open_again: OpenBlobs, size: int) -> None:
    content = os.urandom(size)
    reference = blobs.put(memoryview(content))
    assert reference.size == size
    assert open_again().get(reference) == content
    assert blobs.put(content) == reference
    with open_again().open(reference) as file:
        assert file.read(max(0, size - 2), 10) == content[-2:]


def test_many_contents_at_once(blobs: Blobs, open_again: OpenBlobs) -> None:
    contents = [b"%d" % (number % 90) for number in range(100)]
    references = blobs.put_all(iter(contents))
    assert [bytes(open_again().get(each)) for each in references] == contents
    with open_again().reads() as reads:
        assert [bytes(reads.get(each)) for each in references] == contents
        with pytest.raises(BlobNotFoundError):
            reads.open(BlobReference("0" * 32, 1))
    assert blobs.put_all([]) == []


@pytest.mark.parametrize("digest", ["", "0" * 32, "../../../etc/passwd", "A" * 32, "0" * 5000])
def test_what_is_not_there_is_a_typed_error(blobs: Blobs, digest: str) -> None:
    for call in (
        lambda: blobs.get(BlobReference(digest, 1)),
        lambda: blobs.pin("owner", [digest]),
    ):
        with pytest.raises(BlobNotFoundError) as failure:
            call()
        assert failure.value.digest == digest
    assert not blobs.pinned("owner")


def test_a_pin_of_several_is_all_or_nothing(blobs: Blobs) -> None:
    held, other = blobs.put(b"held"), blobs.put(b"other")
    blobs.pin("owner", [held.digest])
    with pytest.raises(BlobNotFoundError):
        blobs.pin("owner", [held.digest, other.digest, "0" * 32])
    assert blobs.pinned("owner") == {held.digest}


def test_the_collector_spares_the_named_and_the_young(blobs: Blobs, open_again: OpenBlobs) -> None:
    pinned, extra, free = (blobs.put(name) for name in (b"pinned", b"extra", b"free"))
    blobs.pin("run/1", [pinned.digest])
    assert blobs.collect(LONG) == []
    assert open_again().collect(NOW, [extra.digest]) == [free.digest]
    assert [blobs.exists(each) for each in (pinned, extra, free)] == [True, True, False]
    blobs.unpin("run/1", [pinned.digest])
    assert set(blobs.collect(NOW)) == {pinned.digest, extra.digest}


@pytest.mark.parametrize("owner", ["run/a b", "..", "é%2F", "o" * 200])
def test_owners_let_go_each_for_itself(blobs: Blobs, open_again: OpenBlobs, owner: str) -> None:
    reference = blobs.put(b"content")
    blobs.pin(owner, [reference.digest])
    blobs.pin("other", [reference.digest])
    assert set(open_again().owners()) == {owner, "other"}
    blobs.unpin(owner)
    assert blobs.pinned(owner) == set()
    assert blobs.collect(NOW) == []
    blobs.unpin("other", [reference.digest])
    assert blobs.collect(NOW) == [reference.digest]


@pytest.mark.parametrize("owner", ["", "n\0ul", "o" * 5000])
def test_a_name_that_can_be_no_owner_is_an_error_and_no_pin(blobs: Blobs, owner: str) -> None:
    reference = blobs.put(b"content")
    try:
        blobs.pin(owner, [reference.digest])
    except (OSError, ValueError):
        assert blobs.owners() == []
    else:
        assert blobs.pinned(owner) == {reference.digest}
