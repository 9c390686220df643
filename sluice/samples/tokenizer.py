"""Text to token ids and back, by `tokenizers` and the model's chat template alone.

Importing transformers costs seconds of processor time; episode workers and loops need none of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece

from sluice.config import ConfigError
from sluice.samples.chat_template import ChatTemplate, NoChatTemplateError
from sluice.samples.tiktoken_model import FILE, read_tiktoken

# Of Hermes and Qwen models, in some of which they are special tokens.
CALL_MARKS = ("<tool_call>", "</tool_call>")
THREAD_SIZE = 4000  # characters or tokens: a millisecond's work of the tokenizer
_BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
_OPEN_TOKENS = 8  # whose text is waited for: a character has four bytes at most

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs `work` on `size` characters or tokens, in a thread if it holds up the event loop."""
    return await asyncio.to_thread(work) if size > THREAD_SIZE else work()


class TextTokenizer:
    """The tokenizer of a HF model directory."""

    def __init__(self, directory: Path | str) -> None:
        """Raises ConfigError when the directory holds no fast tokenizer, or a broken template."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file() and not (directory / FILE).is_file():
            raise ConfigError(f"tokenizer: {path} does not exist")
        try:
            settings = _read_json(directory / "tokenizer_config.json")
            if path.is_file():
                self._tokenizer = _with_calls(Tokenizer.from_buffer(path.read_bytes()))
            else:
                self._tokenizer = _with_calls(read_tiktoken(directory, settings))
            _check_unknown(self._tokenizer)
            self._special = _special_tokens(settings)
            self._template = _chat_template(directory, settings, self._special)
            self.stop_tokens = self._stop_tokens(directory)
        except (ValueError, LookupError, TypeError) as error:  # of the template among them
            raise ConfigError(f"tokenizer: {directory}: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.end_token_id = self._id("eos_token")

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """By name, e.g. `eos_token`."""
        return self._special

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; `special` adds what the model expects around a text."""
        if len(text) <= THREAD_SIZE:
            encoding = self._tokenizer.encode(text, add_special_tokens=special)
        else:  # a batch alone lets other threads run meanwhile
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation up to where the assistant begins.

        `options` are variables of the template's own, by names that it has. Raises
        NoChatTemplateError, or ChatTemplateError for what the template refuses.
        """
        template = self.chat_template
        template.check_options(options or ())
        text = template.render(messages, tools=tools or None, options=options)
        return self.encode(text, special=False)

    def without_first(self, text: str) -> str:
        """A text less a first token that a template writes and `encode` of special ones adds."""
        first = self._special.get("bos_token")
        if not first or not text.startswith(first):
            return text
        ids = self.encode("", special=True)
        is_added = ids[:1] == self.encode(first, special=False)
        return text[len(first) :] if is_added else text

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises NoChatTemplateError."""
        if self._template is None:
            raise NoChatTemplateError("the tokenizer has no chat template; use plain prompts")
        return self._template

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Ids, without what a model expects around a text, and where in it each token begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [first for first, _ in encoding.offsets]

    def decode(self, sequences: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Texts; `special` leaves special tokens in."""
        texts: list[str] = self._tokenizer.decode_batch(
            [list(sequence) for sequence in sequences], skip_special_tokens=not special
        )
        return texts

    def decoder(self, *, special: bool) -> Callable[[int], str]:
        """Takes tokens one by one; answers text as soon as its bytes are whole.

        `special` answers that of special tokens, too.
        """
        return _Decoder(partial(self._tokenizer.decode, skip_special_tokens=not special)).add

    def _stop_tokens(self, directory: Path) -> tuple[str, ...]:
        """Special tokens at which engines end an answer."""
        named = _read_json(directory / "generation_config.json").get("eos_token_id")
        ids = [each for each in (named if isinstance(named, list) else [named]) if each is not None]
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = (added.get(token_id) for token_id in ids)
        return tuple(token.content for token in tokens if token is not None)

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        token_id: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return token_id


class _Decoder:
    """Decodes tokens one by one, each with those whose text came last and it may depend on.

    A token takes the same time however many bytes came that never become a character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before = list[int]()
        self._told = ""  # of the text of those before and of the open ones
        self._open = list[int]()

    def add(self, token_id: int) -> str:
        self._open.append(token_id)
        text = self._decode([*self._before, *self._open])
        is_cut = text.endswith(_BROKEN)
        if len(self._open) < _OPEN_TOKENS and (is_cut or len(text) <= len(self._told)):
            return self._tell(text.rstrip(_BROKEN))
        alone = self._decode(self._open)
        # Else a broken byte unmade the characters before it, which were told.
        piece = text[len(self._told) :] if text.startswith(self._told) else alone
        self._before, self._open = self._open, []
        self._told = alone.removesuffix(_BROKEN) if is_cut else alone
        return piece.removesuffix(_BROKEN) if is_cut else piece

    def _tell(self, text: str) -> str:
        """What is new in a text that has more to come behind it."""
        if not text.startswith(self._told):
            return ""
        piece, self._told = text[len(self._told) :], text
        return piece


def _with_calls(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that leaves `CALL_MARKS` in texts: without them no call would be seen."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in CALL_MARKS for token in added):
        return tokenizer
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] &= token["content"] not in CALL_MARKS
    return Tokenizer.from_str(json.dumps(document))


def _check_unknown(tokenizer: Tokenizer) -> None:
    """Raises ValueError where a text may need an unknown token that there is none of."""
    model = tokenizer.model
    if isinstance(model, WordLevel | WordPiece) and model.token_to_id(model.unk_token) is None:
        raise ValueError(f"its unknown token {model.unk_token!r} is not in its vocabulary")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} is no object")
    return values


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """By name, e.g. `eos_token`; written as a text or as a token with its properties."""
    tokens = {}
    for name, value in settings.items():
        token = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _chat_template(
    directory: Path, settings: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) else None
