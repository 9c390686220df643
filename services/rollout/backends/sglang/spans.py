"""Weight versions as SGLang carries them: `<version>:<digest>` in its `weight_version`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice.samples.sample import VersionSpan

Version = tuple[int, str]


def tag(version: int, digest: str) -> str:
    return f"{version}:{digest}"


def parse_tag(text: object) -> Version | None:
    """None for a name that we did not give."""
    number, separator, digest = str(text).partition(":")
    if not (separator and number.isdigit() and digest):
        return None
    return int(number), digest


def of_tokens(versions: Iterable[Version], first: int) -> tuple[VersionSpan, ...]:
    """Spans of tokens drawn one after the other, of which the first has index `first`."""
    spans: list[VersionSpan] = []
    for place, (version, digest) in enumerate(versions, first):
        if spans and (spans[-1].version, spans[-1].digest) == (version, digest):
            begin = spans.pop().first_token
        else:
            begin = place
        spans.append(
            VersionSpan(version=version, digest=digest, first_token=begin, last_token=place)
        )
    return tuple(spans)


def versions_of(meta: Mapping[str, Any], count: int) -> list[Version] | None:
    """The version of each of `count` tokens of a finished sample; None where SGLang cannot say."""
    found: list[Version] = []
    for span in meta.get("weight_versions") or ():
        version = parse_tag(span["version"])
        if version is None or span["start"] != len(found):
            return None
        found += [version] * (span["end"] - span["start"])
    return found[:count] if len(found) >= count else None
