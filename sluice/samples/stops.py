"""Stop strings: with which token of a sample the first of them is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LONGEST_STOP = 1024  # characters
_CHARACTER_TOKENS = 4  # at most, of bytes
_FIRST_TOKENS = 16  # of a text, which read otherwise than in the middle of one


class StopMatch:
    """Finds one stop string in a text that comes in pieces, in time that does not depend on how
    long the string is (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of it with which what came so far ends
        self._borders = [0, 0]  # by length: of the longest beginning that this one ends with, too

    def find(self, piece: str) -> int:
        """Returns where in the piece the string ends for the first time; 0: nowhere."""
        for end, character in enumerate(piece, 1):
            self.matched = self._extended(self.matched, character)
            if self.matched == len(self.text):
                return end
        return 0

    def _extended(self, size: int, character: str) -> int:
        while size and (size == len(self.text) or self.text[size] != character):
            size = self._border(size)
        return size + (self.text[size] == character)

    def _border(self, size: int) -> int:
        while len(self._borders) <= size:  # only as far as the text got
            last = len(self._borders) - 1
            self._borders.append(self._extended(self._borders[last], self.text[last]))
        return self._borders[size]


class StopSearch:
    """Takes the tokens of one sample one by one, and tells the one that completes a stop string."""

    def __init__(
        self, decode: Callable[[int], str], stops: Sequence[str], before: Sequence[int] = ()
    ) -> None:
        """`decode` takes tokens one by one; `stops` are not empty.

        `before`: tokens that the sample has already, in which a stop string may have begun.
        """
        self._decode, self._matches = decode, [StopMatch(stop) for stop in stops]
        reach = _CHARACTER_TOKENS * max(map(len, stops)) + _FIRST_TOKENS
        for token_id in before[-reach:]:
            self.add(token_id)

    def add(self, token_id: int) -> bool:
        """Whether a stop string ends in the text that the token adds."""
        piece = self._decode(token_id)
        return bool(piece) and any([match.find(piece) for match in self._matches])
