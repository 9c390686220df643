"""Tokens as text while they come, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.samples.tokenizer import TextTokenizer


class TextStream:
    """The text of one answer. Text that may turn out to be part of a stop string is held back."""

    def __init__(
        self, tokenizer: TextTokenizer, stops: Sequence[str], *, special: bool, keep_stop: bool
    ) -> None:
        """`special`: show special tokens; `keep_stop`: the stop string belongs to the text."""
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._special, self._keep_stop = special, keep_stop
        self._decode = tokenizer.decoder(special=special)
        self._token_ids: list[int] = []
        self._shown = 0  # characters
        self.text = ""
        self.stopped = False

    def add(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text to show now, and how many of the tokens were taken: up to the end of a stop."""
        for count, token_id in enumerate(token_ids, 1):
            self._token_ids.append(token_id)
            if piece := self._decode(token_id):
                self._grow(piece)
            if self.stopped:
                return self._show(len(self.text)), count
        return self._show(len(self.text) - self._held_back()), len(token_ids)

    def finish(self) -> str:
        """The rest, once no token follows."""
        if not self.stopped:
            (whole,) = self._tokenizer.decode([self._token_ids], special=self._special)
            if len(whole) > len(self.text) and whole.startswith(self.text):
                self._grow(whole[len(self.text) :])  # bytes that never became a character
        return self._show(len(self.text))

    def _grow(self, piece: str) -> None:
        longest = max(map(len, self._stops), default=1)
        first = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, first)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) if self._keep_stop else at]
            self.stopped = True

    def _held_back(self) -> int:
        """Characters at the end with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self.text[start : self._shown]
