"""Images of a prompt, as an engine is sent them: checked, and as many tokens as they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.rollout.engine.interface import TEXT_ONLY, Media
from services.rollout.errors import ImageProcessorError, MediaUnsupportedError
from sluice.config import ConfigError
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.images import ImageRules, InvalidImageError
from sluice.samples.sample import MediaSpan

_SHOWN = ("image_token_id", "video_token_id")  # of config.json


@dataclass(frozen=True)
class ImageReader:
    """How one model is shown images.

    placeholder: the token that stands for an image, or none. unsampled: tokens that stand for a
    medium; a sample ends that draws one, for nothing would be there to see. refusal: why it is
    shown none.
    """

    rules: ImageRules | None = None
    placeholder: int = -1
    unsampled: tuple[int, ...] = ()
    refusal: str = TEXT_ONLY

    @classmethod
    def of_model(cls, directory: Path, config: Mapping[str, Any]) -> ImageReader:
        """Read what a model of this `config.json` needs; it may still refuse every image."""
        if not reads_media(config):
            return cls()
        tokens = tuple(config[name] for name in _SHOWN if isinstance(config.get(name), int))
        placeholder = config.get(_SHOWN[0])
        if not isinstance(placeholder, int):
            return cls(unsampled=tokens, refusal=f"config.json has no {_SHOWN[0]}")
        try:
            rules = ImageRules.from_directory(directory)
        except ConfigError as error:
            return cls(unsampled=tokens, refusal=str(error))
        return cls(rules, placeholder, tokens)

    @property
    def processor(self) -> str:
        """Digest of the rules, empty where there are none."""
        return "" if self.rules is None else self.rules.digest

    def check_text(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidFieldError for tokens that stand for a medium, where none is shown."""
        for token in self.unsampled:
            if token in token_ids:
                raise InvalidFieldError(
                    "token_ids", f"has {token}, which stands for a medium: scores are of text alone"
                )

    def read(
        self, prompt: Sequence[int], media: Sequence[Media], processor: str = ""
    ) -> ShownPrompt:
        """Return the prompt with every placeholder as often as its image has tokens.

        `processor`: digest of the rules by which the images were prepared, if it is known. Raises
        MediaUnsupportedError, ImageProcessorError for other rules than these, and
        InvalidFieldError for images that were not prepared as this model's are, or that are not as
        many as the placeholders.
        """
        if self.rules is None:
            if media:
                raise MediaUnsupportedError(self.refusal)
            return ShownPrompt(prompt)
        if media and processor and processor != self.processor:
            raise ImageProcessorError(
                "images are prepared by other rules than those of the model that serves: give "
                "episode workers the preprocessor_config.json of that model",
                expected=self.processor,
                actual=processor,
            )
        places = sum(token == self.placeholder for token in prompt)
        if places != len(media):
            raise InvalidFieldError(
                "media", f"are {len(media)}, for {places} placeholders {self.placeholder}"
            )
        if not media:
            return ShownPrompt(prompt)
        images = iter([(one, _grid(self.rules, index, one)) for index, one in enumerate(media)])
        tokens, spans = list[int](), list[MediaSpan]()
        for token in prompt:
            if token != self.placeholder:
                tokens.append(token)
                continue
            one, grid = next(images)
            span = MediaSpan(
                digest=one.digest,
                size=len(one.data),
                kind=one.kind.value,
                first_token=len(tokens),
                token_count=self.rules.count_tokens(grid),
                grid_thw=grid,
            )
            spans.append(span)
            tokens += [token] * span.token_count
        return ShownPrompt(tokens, tuple(spans))


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt as the model reads it: every image's placeholder once a token."""

    token_ids: Sequence[int]
    media: tuple[MediaSpan, ...] = ()


def _grid(rules: ImageRules, index: int, media: Media) -> tuple[int, int, int]:
    try:
        return rules.grid_of(media.data)
    except InvalidImageError as error:
        raise InvalidFieldError(
            f"media[{index}]", str(error), digest=media.digest, image=error.reason
        ) from None


def reads_media(config: Mapping[str, Any]) -> bool:
    """Whether the model of this `config.json` sees."""
    return "vision_config" in config
