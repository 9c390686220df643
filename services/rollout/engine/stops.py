"""The stop strings of requests, for engines, which have tokens alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from services.rollout.engine.interface import Generation, check_stop
from services.rollout.errors import NoTokenizerError
from sluice.config import ConfigError
from sluice.samples.stops import StopSearch

if TYPE_CHECKING:
    from sluice.samples.tokenizer import TextTokenizer


class StopStrings:
    """Holds the tokenizer of an engine, which is read once a request has stop strings."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` is of a HF model; None where there is no tokenizer."""
        self._directory, self._reading = directory, asyncio.Lock()
        self._tokenizer: TextTokenizer | None = None

    async def searches(self, generation: Generation) -> list[StopSearch]:
        """Returns one per sample, or none without stop strings.

        Raises InvalidFieldError and NoTokenizerError.
        """
        stops, count = generation.sampling.stop, generation.sampled_count
        if not stops:
            return []
        check_stop(stops, "sampling.stop")
        async with self._reading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._read)
        tokenizer = self._tokenizer
        before = generation.prompt_token_ids[len(generation.prompt_token_ids) - count :]

        def make() -> list[StopSearch]:
            samples = range(generation.sample_count)
            return [StopSearch(tokenizer.decoder(special=True), stops, before) for _ in samples]

        return await asyncio.to_thread(make)

    def _read(self) -> TextTokenizer:
        if self._directory is None:
            raise NoTokenizerError("the engine has no tokenizer: set `tokenizer` or engine.model")
        # Imported here: most engines are asked for no text.
        from sluice.samples.tokenizer import TextTokenizer

        try:
            return TextTokenizer(self._directory)
        except ConfigError as error:
            raise NoTokenizerError(f"the engine finds no stop strings: {error}") from error
