"""Text of tokens as they come is the text of all of them, and never shows part of a stop string."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.rollout.openai.generation import TextStream
from sluice.samples.tokenizer import TextTokenizer

TEXTS = ["naïve café 漢字 🙂🙂 end", "a stop here. stop there", "12 + 34 = 46\n\nUser: next"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Byte-level BPE: a token may be part of a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save(str(directory / "tokenizer.json"))
    return TextTokenizer(directory)


def shown(
    tokenizer: TextTokenizer, token_ids: list[int], stops: list[str], size: int = 1
) -> tuple[list[str], TextStream, int]:
    """Pieces shown, the stream, and how many tokens it took."""
    stream = TextStream(tokenizer, stops, special=False, keep_stop=False)
    pieces, taken = [], 0
    for first in range(0, len(token_ids), size):
        piece, count = stream.add(token_ids[first : first + size])
        pieces.append(piece)
        taken += count
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream, taken


@settings(max_examples=50)
@given(st.lists(st.integers(0, 299), max_size=40), st.integers(1, 5))
def test_pieces_add_up_to_the_decoded_text(
    tokenizer: TextTokenizer, token_ids: list[int], size: int
) -> None:
    pieces, stream, taken = shown(tokenizer, token_ids, [], size)
    (whole,) = tokenizer.decode([token_ids])
    assert "".join(pieces) == whole == stream.text
    assert taken == len(token_ids)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 299), min_size=1, max_size=3), st.integers(1, 60))
def test_a_model_that_repeats_half_a_character_is_shown_as_it_goes(
    tokenizer: TextTokenizer, token_ids: list[int], count: int
) -> None:
    repeated = token_ids * count
    stream = TextStream(tokenizer, [], special=False, keep_stop=False)
    for token_id in repeated:
        stream.add([token_id])
    (whole,), (late,) = tokenizer.decode([repeated]), tokenizer.decode([repeated[-16:]])
    assert len(whole) - len(stream.text) <= len(late)
    stream.finish()
    assert stream.text == whole


def test_a_byte_that_unmakes_the_characters_before_it_ends_no_answer(tmp_path: Path) -> None:
    names = ["a", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    token_ids = [0, *(1 + byte for byte in "漢字".encode()), 1 + 0xFF, 0, 0]
    pieces, _, _ = shown(TextTokenizer(tmp_path), token_ids, [])
    assert "".join(pieces) == "a漢字\ufffdaa"


@settings(max_examples=50)
@given(
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from(["stop", "op h", "\n\n", "🙂", "= 4", "caf", "zz"]), max_size=3),
    st.integers(1, 4),
)
def test_the_text_ends_before_the_first_stop_string(
    tokenizer: TextTokenizer, text: str, stops: list[str], size: int
) -> None:
    token_ids = tokenizer.encode(text, special=False)
    pieces, stream, taken = shown(tokenizer, token_ids, stops, size)
    places = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(places)] if places else text)
    assert stream.stopped == bool(places)
    if places:  # the tokens end with the one that ended the stop string
        (needed,) = tokenizer.decode([token_ids[:taken]])
        (less,) = tokenizer.decode([token_ids[: taken - 1]])
        assert any(stop in needed for stop in stops)
        assert not any(stop in less for stop in stops)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known(
    tokenizer: TextTokenizer,
) -> None:
    token_ids = tokenizer.encode("a stoic", special=False)
    stream = TextStream(tokenizer, ["stop"], special=False, keep_stop=False)
    seen = ""
    for token_id in token_ids:
        seen += stream.add([token_id])[0]
        (so_far,) = tokenizer.decode([token_ids])
        assert so_far.startswith(seen)
        assert not seen.endswith(("s", "st", "sto"))
    assert seen + stream.finish() == "a stoic"


def test_a_stop_string_may_be_kept(tokenizer: TextTokenizer) -> None:
    stream = TextStream(tokenizer, ["stop"], special=False, keep_stop=True)
    text, _ = stream.add(tokenizer.encode("a stop here", special=False))
    assert text == "a stop"


def test_special_tokens_are_shown_on_demand(tokenizer: TextTokenizer) -> None:
    token_ids = [*tokenizer.encode("a", special=False), 0]
    for special, expected in ((False, "a"), (True, "a<end>")):
        stream = TextStream(tokenizer, [], special=special, keep_stop=False)
        assert stream.add(token_ids)[0] + stream.finish() == expected


@settings(max_examples=200)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_a_text_ends_at_the_first_stop_and_shows_all_that_cannot_become_one(
    tokenizer: TextTokenizer, text: str, stops: list[str], size: int
) -> None:
    stream = TextStream(tokenizer, stops, special=False, keep_stop=False)
    token_ids = [
        token for character in text for token in tokenizer.encode(character, special=False)
    ]
    said = came = ""
    for first in range(0, len(token_ids), size):
        said += stream.add(token_ids[first : first + size])[0]
        came = text[: first + size]
        ends = [came.find(stop) + len(stop) for stop in stops if stop in came]
        assert stream.stopped == bool(ends)
        if ends:
            came = text[: min(ends)]
            assert said == stream.text == came[: min(map(came.find, filter(came.count, stops)))]
            return
        begun = [n for stop in stops for n in range(len(stop)) if came.endswith(stop[:n])]
        assert said == came[: len(came) - max(begun)]
    assert said + stream.finish() == text


def test_a_stop_string_costs_no_more_the_longer_it_and_the_text_are(
    tokenizer: TextTokenizer,
) -> None:
    def calls(tokens: int, stop: str) -> int:
        (letter,) = tokenizer.encode("a", special=False)
        stream, counted = TextStream(tokenizer, [stop], special=False, keep_stop=False), 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            for _ in range(tokens):
                stream.add([letter])
        finally:
            sys.setprofile(None)
        assert not stream.stopped
        return counted

    for stop in ("z" * 100_000, "a" * 100_000, "b" + "a" * 100_000):
        calls(100, stop)  # what is done once
        assert calls(400, stop) < 5 * calls(100, stop)
