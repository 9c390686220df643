"""Documents that carry the digest of their own content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import digest_bytes, seal, unseal

KEY = "manifest_digest"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(texts.filter(lambda name: name != KEY), values, min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(documents)
def test_what_is_sealed_is_read_again(document: dict[str, Any]) -> None:
    data = seal(document, KEY)
    assert unseal(data, KEY, "file") == document
    assert list(json.loads(data)) == [KEY, *sorted(document)]


@settings(max_examples=100, deadline=None)
@given(documents)
def test_what_earlier_releases_sealed_is_read(document: dict[str, Any]) -> None:
    def render(whole: dict[str, Any]) -> bytes:
        return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()

    data = render({**document, KEY: digest_bytes(render(document))})
    assert unseal(data, KEY, "file") == document


def test_a_changed_byte_is_found() -> None:
    tensors = {name: {"shape": [2, 3], "dtype": "F32"} for name in ("first", "second")}
    document = {"version": 3, "tensors": tensors, "line": 'manifest_digest": "'}
    data = seal(document, KEY)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises((FileDigestError, ValueError, KeyError, TypeError)):
            unseal(bytes(changed), KEY, "file")
    with pytest.raises((FileDigestError, ValueError)):
        unseal(data[:-1], KEY, "file")


def test_each_tensor_has_a_line() -> None:
    names = [f"model.layers.{number}.weight" for number in range(40)]
    data = seal({"tensors": {name: {"dtype": "F32"} for name in names}}, KEY)
    lines = [line for line in data.decode().splitlines() if "weight" in line]
    assert len(lines) == len(names)
