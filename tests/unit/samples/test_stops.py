"""A sample ends with the token by which the text of all its tokens first holds a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.samples.stops import StopMatch, StopSearch
from sluice.samples.tokenizer import TextTokenizer
from tests.decoded_stops import expected

TEXTS = ["naïve café 漢字 🙂🙂 end", "</search> <search>", "a\n\nUser: next\0", "x — y…"]
STOPS = [
    "</search>",
    "</s",
    "h>",
    "\n\n",
    "漢",
    "🙂🙂",
    "é ",
    " ",
    "<end>",
    "a<end>",
    "\0",
    "y",
    "a",
]
LONG = "qwrtzpsdfghjkl" * 3  # a token for each character
SIZE = 320


def byte_level(directory: Path) -> Path:
    """Tokens may be parts of characters, or a character and part of the next."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.save(str(directory / "tokenizer.json"))
    return directory


def byte_fallback(directory: Path) -> Path:
    """As Llama's: bytes are tokens of their own, a text's first space is none."""
    words = ["<end>", "▁", "▁a", "a", "</", "s", "</s", "earch", ">", "h>", "x", "User", "\n", "漢"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = request.param(tmp_path_factory.mktemp("tokenizer"))
    return folder


def without_cut_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Leaves out bytes of longer characters, where bytes are tokens.

    A run of them that is no UTF-8 is unreadable as a whole, with all that is in it, and not as it
    comes.
    """
    bytes_of_more = {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(128, 256)}
    return [each for each in token_ids if each not in bytes_of_more]


def found(directory: Path, token_ids: Sequence[int], stops: Sequence[str], before: int = 0) -> int:
    decode = TextTokenizer(directory).decoder(special=True)
    search = StopSearch(decode, stops, token_ids[:before])
    ends = (n for n, each in enumerate(token_ids[before:], before + 1) if search.add(each))
    return next(ends, 0)


token_lists = st.lists(st.integers(0, 315), max_size=24)
texts = st.lists(st.sampled_from([*STOPS, *TEXTS, "</sear", "</</search"]), max_size=4)
stop_lists = st.lists(st.sampled_from(STOPS), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(token_lists, texts, token_lists, stop_lists, st.floats(0, 1), st.sampled_from([1, 20]))
@example([], ["</sear", "</search>"], [], ["</search>", "</s"], 0.5, 1)
@example([3], ["</search>"], [], ["</search>"], 0.99, 20)
@example([142, *[14] * 9], ["é ", "é ", "</search>"], [], ["</search>"], 0.0, 1)
@example([], [LONG], [], [LONG, "漢"], 0.99, 1)
def test_the_first_token_with_which_the_text_holds_a_stop_string(
    directory: Path,
    first: list[int],
    said: list[str],
    last: list[int],
    stops: list[str],
    share: float,
    times: int,
) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    inner = tokenizer.encode("".join(said), add_special_tokens=False).ids
    first, last = ([each % size for each in part] for part in (first, last))
    first, last = (without_cut_bytes(tokenizer, part) for part in (first, last))
    token_ids = [*first * times, *inner, *last]
    end = expected(directory, token_ids, stops)
    assert found(directory, token_ids, stops) == end
    # cut off somewhere before, and gone on from there
    cut = int(share * max(0, (end or len(token_ids)) - 1))
    assert found(directory, token_ids, stops, cut) == end


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", max_size=6), max_size=12), st.text("ab", min_size=1, max_size=8))
@example(["aab"], "ab")
@example(["aabaa", "", "baaab"], "aabaaa")
def test_a_string_that_begins_anew_in_itself_is_found_where_it_ends_first(
    pieces: list[str], stop: str
) -> None:
    match, text, end = StopMatch(stop), "", 0
    for piece in pieces:
        if end := match.find(piece):
            end += len(text)
            break
        text += piece
    at = "".join(pieces).find(stop)
    assert end == (at + len(stop) if at >= 0 else 0)
