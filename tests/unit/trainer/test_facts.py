"""Facts about rows: written once, read without the rows, never believed where they are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from services.trainer.controller.uploads import find_facts
from services.trainer.rank.table import RowTable
from services.trainer.rows import RowLimits
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.balance.planner import OversizePolicy
from sluice.runtime.errors import DataLossError, InvalidFieldError
from sluice.runtime.wire import blob_to_proto
from sluice.samples import arrow
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import (
    InvalidFactsError,
    MediaSpan,
    RowFacts,
    Sample,
    VersionSpan,
    describe_rows,
)
from tests.unit.trainer.rows import LIMITS, make_sample


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, sync=False)


def group() -> list[Sample]:
    """Three siblings and one of another prompt; a mask, a reward and a version here and there."""
    mask = np.array([True, False, True])
    rows = [
        make_sample("g/0", [1, 2], [3, 4], reward=1.0),
        make_sample("g/1", [1, 2], [5], reward=2.0, weight=0.5, temperature=0.7),
        make_sample("g/2", [1, 2], [6, 7, 8], loss_mask=mask, reward=0.0),
        make_sample("g/3", [1, 3], [6], reward=0.0),
    ]
    spans = tuple(
        VersionSpan(version=version, digest="d", first_token=place, last_token=place)
        for place, version in enumerate((7, 5))
    )
    return [replace(rows[0], spans=spans), *rows[1:]]


def old_blob(samples: Sequence[Sample]) -> bytes:
    """The group as versions wrote it that knew no facts."""
    with pa.ipc.open_file(arrow.encode_group(samples)) as reader:
        batch = reader.get_batch(0)
        schema = batch.schema.with_metadata({arrow.FORMAT_KEY: arrow.FORMAT})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue().to_pybytes())


def old_text(facts: RowFacts) -> str:
    """The facts as they were written when every number was text."""
    names = ("lengths", "prompt_lengths", "prompts", "mask_counts", "oldest_versions")
    document = {name: getattr(facts, name).tolist() for name in names}
    present = {
        name: True if rows.all() else np.flatnonzero(rows).tolist()
        for name, rows in facts.present.items()
    }
    temperatures = [None if np.isnan(each) else each for each in facts.temperatures.tolist()]
    ids = {"sample_ids": list(facts.sample_ids), "group_ids": list(facts.group_ids)}
    return json.dumps({**document, **ids, "temperatures": temperatures, "present": present})


def with_facts(samples: Sequence[Sample], text: str, key: bytes = arrow.FACTS_KEY) -> bytes:
    """The group with other facts, such as a writer may get wrong, under their digest."""
    with pa.ipc.open_file(arrow.encode_group(samples)) as reader:
        batch = reader.get_batch(0)
    facts = text.encode()
    digest = xxhash.xxh3_128_hexdigest(facts).encode()
    metadata = {arrow.FORMAT_KEY: arrow.FORMAT, key: facts, arrow.FACTS_DIGEST_KEY: digest}
    sink = pa.BufferOutputStream()
    schema = batch.schema.with_metadata(metadata)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(metadata))
    return bytes(sink.getvalue().to_pybytes())


def add(blobs: BlobStore, reference: BlobReference, rows: Sequence[int]) -> RowTable:
    """The rows of a blob on a rank."""
    table = RowTable(blobs, LIMITS)
    owned = pb.BlobRows(blob=blob_to_proto(reference), indices=rows, rows=rows)
    table.add(pb.AddRows(batch_id="b", blobs=[owned]))
    return table


def path_of(blobs: BlobStore, reference: BlobReference) -> Path:
    return blobs.root / "blobs" / reference.digest


def flip(blobs: BlobStore, reference: BlobReference, place: int) -> None:
    path = path_of(blobs, reference)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def same(one: RowFacts, other: RowFacts) -> bool:
    return one.to_json() == other.to_json()


def test_facts_tell_what_the_rows_are() -> None:
    facts = describe_rows(group())
    assert facts.lengths.tolist() == [4, 3, 5, 3]
    assert facts.prompt_lengths.tolist() == [2, 2, 2, 2]
    assert facts.mask_counts.tolist() == [2, 1, 2, 1]
    assert facts.oldest_versions.tolist() == [5, -1, -1, -1]
    assert facts.prompts[0] == facts.prompts[1] == facts.prompts[2] != facts.prompts[3]
    elsewhere = describe_rows([make_sample("h/0", [1, 2], [3])])
    assert elsewhere.prompts[0] not in facts.prompts, "the same prompt in another group"
    assert {name: rows.tolist() for name, rows in facts.present.items()} == {
        "reward": [True] * 4,
        "weight": [False, True, False, False],
        "loss_mask": [False, False, True, False],
        "temperature": [False, True, False, False],
    }
    assert np.isnan(facts.temperatures).tolist() == [True, False, True, True]
    assert facts.temperatures[1] == 0.7
    again = RowFacts.from_json(facts.to_json())
    assert np.array_equal(again.temperatures, facts.temperatures, equal_nan=True)
    assert same(again, facts) and again.present["weight"].tolist() == [False, True, False, False]


def test_facts_of_before_temperatures_were_kept_have_none() -> None:
    document = json.loads(old_text(describe_rows(group())))
    del document["temperatures"]
    assert np.isnan(RowFacts.from_json(json.dumps(document)).temperatures).all()
    for wrong in ([0.7], ["x"] * 4, 0.7, None):
        with pytest.raises(InvalidFactsError):
            RowFacts.from_json(json.dumps({**document, "temperatures": wrong}))


def test_facts_of_several_groups_join_in_order() -> None:
    first, second = group(), [make_sample("h/0", [1], [2], episode=3.0)]
    joined = RowFacts.join([describe_rows(first), describe_rows(second)])
    assert same(joined, describe_rows([*first, *second]))
    assert len(RowFacts.join([]).lengths) == 0


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"lengths": 3}', describe_rows(group()).to_json()[:-1] + ',"present":3}'],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidFactsError):
        RowFacts.from_json(text)
    short = replace(describe_rows(group()), lengths=np.array([4]))
    with pytest.raises(InvalidFactsError):
        RowFacts.from_json(short.to_json())


def test_the_controller_reads_no_rows(blobs: BlobStore) -> None:
    """Bytes of rows may be anything, which only the rank that reads them tells."""
    reference = blobs.put(arrow.encode_group(group()))
    tokens = np.concatenate([row.token_ids for row in group()]).tobytes()
    place = path_of(blobs, reference).read_bytes().index(tokens)
    flip(blobs, reference, place)
    assert same(find_facts(blobs, reference, LIMITS), describe_rows(group()))
    with pytest.raises(DataLossError) as caught:
        add(blobs, reference, [0, 3])
    assert caught.value.metadata["blob"] == reference.digest


def test_a_flipped_byte_is_noticed(blobs: BlobStore) -> None:
    """Wherever it is in what the controller reads: facts are right, or the blob is refused."""
    data = arrow.encode_group(group())
    text = describe_rows(group()).to_json()
    first = data.index(text.encode())  # in front of the rows, which is what readers use
    places = range(0, 16 + int.from_bytes(data[12:16], "little"), 3)
    refused = set()
    for place in places:
        reference = blobs.put(data)
        flip(blobs, reference, place)
        try:
            assert find_facts(blobs, reference, LIMITS).to_json() == text
        except DataLossError as error:
            assert error.metadata["blob"] == reference.digest
            refused.add(place)
        with pytest.raises(DataLossError):  # the rank reads all
            add(blobs, reference, [0])
    assert refused.issuperset(place for place in places if 0 <= place - first < len(text))


def test_blobs_without_facts_are_read_whole(blobs: BlobStore) -> None:
    reference = blobs.put(old_blob(group()))
    assert arrow.read_facts(blobs.get(reference)) is None
    assert same(find_facts(blobs, reference, LIMITS), describe_rows(group()))
    assert sorted(add(blobs, reference, [1, 2]).rows("b")) == [1, 2]
    foreign = blobs.put(old_blob([make_sample("g/0", [1], [50])]))
    with pytest.raises(InvalidFieldError, match=r"0\.\.49"):
        find_facts(blobs, foreign, LIMITS)


def test_facts_of_an_older_version_are_read(blobs: BlobStore) -> None:
    """As numbers in text; no row is read for them either."""
    text = old_text(describe_rows(group()))
    data = with_facts(group(), text, arrow.OLD_FACTS_KEY)
    reference = blobs.put(data)
    assert same(arrow.read_facts(data) or describe_rows([]), describe_rows(group()))
    flip(blobs, reference, data.index(np.concatenate([r.token_ids for r in group()]).tobytes()))
    assert same(find_facts(blobs, reference, LIMITS), describe_rows(group()))
    flip(blobs, reference, data.index(text.encode()) + 20)
    with pytest.raises(DataLossError):
        find_facts(blobs, reference, LIMITS)


def test_facts_of_very_many_rows_are_read_without_them(blobs: BlobStore) -> None:
    """They are longer than what is read at first."""
    samples = [make_sample(f"g/{row}", [1, 2], [3, 4, row % 50]) for row in range(3000)]
    data = arrow.encode_group(samples)
    reference = blobs.put(data)
    flip(blobs, reference, data.index(samples[0].token_ids.tobytes()))
    assert same(find_facts(blobs, reference, LIMITS), describe_rows(samples))


def test_rows_are_checked_where_they_are_read(blobs: BlobStore) -> None:
    """On the rank, and only the rows that it owns."""
    samples = [*group(), make_sample("g/4", [1], [50])]
    reference = blobs.put(arrow.encode_group(samples))
    assert len(find_facts(blobs, reference, LIMITS).lengths) == 5
    assert sorted(add(blobs, reference, [0, 1]).rows("b")) == [0, 1]
    with pytest.raises(InvalidFieldError) as caught:
        add(blobs, reference, [1, 4])
    assert caught.value.metadata["sample_id"] == "g/4"
    assert caught.value.metadata["field"] == "token_ids"


THIRD = np.array([0, 0, 1, 0])
CHANGES: dict[str, Callable[[RowFacts], RowFacts]] = {
    "lengths": lambda facts: replace(facts, lengths=facts.lengths + THIRD),
    "prompts": lambda facts: replace(facts, prompts=facts.prompts[[0, 1, 3, 3]]),
    "mask_counts": lambda facts: replace(facts, mask_counts=facts.mask_counts + THIRD),
    "oldest_versions": lambda facts: replace(facts, oldest_versions=np.array([5, -1, 3, -1])),
    "group_id": lambda facts: replace(facts, group_ids=["g", "g", "h", "g"]),
    "patches": lambda facts: replace(facts, patches={2: ((4,), ())}),
    "temperature": lambda facts: replace(facts, temperatures=np.array([np.nan, 0.7, 1.0, np.nan])),
    "episode": lambda facts: replace(facts, episodes=np.array([0.0, 0.0, 3.0, 0.0])),
    "values": lambda facts: replace(
        facts, present={**facts.present, "values": np.array([False, False, True, False])}
    ),
    "loss_mask": lambda facts: replace(
        facts, present={**facts.present, "loss_mask": np.zeros(4, dtype=np.bool_)}
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_facts_that_are_not_those_of_the_rows_are_refused(blobs: BlobStore, what: str) -> None:
    """A plan that was made of them would be wrong, and so would the divisor of the loss."""
    wrong = CHANGES[what](describe_rows(group())).to_json()
    reference = blobs.put(with_facts(group(), wrong))
    find_facts(blobs, reference, LIMITS)
    add(blobs, reference, [0, 1])
    with pytest.raises(InvalidFieldError, match=f"{what} of sample 'g/2'") as caught:
        add(blobs, reference, [0, 2])
    assert caught.value.metadata["blob"] == reference.digest


def test_rows_that_are_cut_are_read(blobs: BlobStore) -> None:
    """What a mask leaves in of the tokens that stay is no fact of the whole row."""
    limits = RowLimits(vocabulary_size=50, max_tokens=4, oversize=OversizePolicy.TRUNCATE)
    facts = find_facts(blobs, blobs.put(arrow.encode_group(group())), limits)
    assert facts.lengths.tolist() == [4, 3, 4, 3]
    assert facts.mask_counts.tolist() == [2, 1, 1, 1]


def test_patches_of_images_are_facts(blobs: BlobStore) -> None:
    """By image, in the prompt and behind it, of the rows that show any."""
    plain, seeing = make_sample("g/0", [1], [2]), make_sample("g/1", [9, 9, 1], [2, 9, 9, 9, 3])
    mask = np.array([True, False, False, False, True])

    def span(first: int, count: int, grid: tuple[int, ...]) -> MediaSpan:
        return MediaSpan(
            digest="0" * 32,
            size=1,
            kind="image",
            first_token=first,
            token_count=count,
            grid_thw=grid,
        )

    media = span(0, 2, (1, 2, 4)), span(4, 3, (1, 6, 2))
    seeing = replace(seeing, media=media, columns={"loss_mask": mask})
    facts = describe_rows([plain, seeing])
    assert facts.patches == {1: ((8,), (12,))}
    again = RowFacts.from_json(facts.to_json())
    assert again.patches == facts.patches and not again.difference(
        describe_rows([plain, seeing]), [0, 1]
    )
    joined = RowFacts.join([describe_rows([plain]), facts, facts])
    assert joined.patches == {2: ((8,), (12,)), 4: ((8,), (12,))}
    assert "patches" not in json.loads(describe_rows([plain]).to_json())
    for wrong in (
        [],
        {"9": [[1], []]},
        {"0": [[0], []]},
        {"0": [["1"], []]},
        {"0": 1},
        {"0": [[]]},
    ):
        document = {**json.loads(facts.to_json()), "patches": wrong}
        with pytest.raises(InvalidFactsError):
            RowFacts.from_json(json.dumps(document))
