"""What a vision-language model makes of a row's images: features, their places, positions.

The tower is the one that transformers runs, whatever runs the text: it sees every distinct image
once, and its features go by media spans, never by token ids, which a policy may have sampled.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sluice.model_types import TOWERS
from sluice.samples.images import CHANNELS, ImageRules
from sluice.samples.sample import MediaSpan

FAMILIES = TOWERS
TEXT = -1  # a token that shows no image


def part_of(name: str) -> str:
    """Return which part a parameter is of, by transformers' or Megatron's name.

    One of "text", "tower", and "projector", which makes tokens of patches.
    """
    if "visual." not in name and "vision_model." not in name:
        return "text"
    return "projector" if "merger" in name else "tower"


def rotary_positions(length: int, media: Sequence[MediaSpan], merge_size: int) -> np.ndarray:
    """Compute int64[3, length]: time, height and width of every token of a row.

    Text counts on in all three. The tokens of an image share a time and lie in its grid, merged;
    text behind goes on where its longer side ends (arXiv 2409.12191, section 2.1).
    """
    positions = np.empty((3, length), dtype=np.int64)
    end = start = 0  # token behind the last image, and its position
    for span in media:
        _, height, width = (side // merge_size for side in span.grid_thw)
        start += span.first_token - end
        positions[:, end : span.first_token] = np.arange(start - span.first_token + end, start)
        places = np.arange(span.token_count)
        positions[0, span.first_token : span.end] = start
        positions[1, span.first_token : span.end] = start + places // width
        positions[2, span.first_token : span.end] = start + places % width
        start += max(height, width)
        end = span.end
    positions[:, end:] = np.arange(start, start + length - end)
    return positions


@dataclass(frozen=True)
class Features:
    """Features of distinct images, one behind the other.

    layers: float[n, hidden] each; the first takes the place of the placeholders' embeddings, the
    k-th further one is added behind the k-th layer of the text (deepstack). starts: first row of
    an image, by digest.
    """

    layers: tuple[torch.Tensor, ...] = ()
    starts: Mapping[str, int] = field(default_factory=dict)

    def index(self, length: int, media: Iterable[MediaSpan]) -> np.ndarray:
        """Return int64[length]: which row stands for each token, TEXT for none."""
        index = np.full(length, TEXT, dtype=np.int64)
        for span in media:
            start = self.starts[span.digest]
            index[span.first_token : span.end] = np.arange(start, start + span.token_count)
        return index

    def by_image(self) -> dict[str, list[torch.Tensor]]:
        """Return the layers of every image apart, by digest."""
        ends = [*self.starts.values(), len(self.layers[0]) if self.layers else 0][1:]
        return {
            digest: [layer[start:end] for layer in self.layers]
            for (digest, start), end in zip(self.starts.items(), ends, strict=True)
        }

    def cut(self) -> Features:
        """Return the same as leaves, whose gradients `backward` hands on, however many passes."""
        if not any(layer.requires_grad for layer in self.layers):
            return self
        leaves = tuple(layer.detach().requires_grad_() for layer in self.layers)
        return Features(leaves, self.starts)

    def backward_behind(self, leaves: Features) -> None:
        """Have `backward` run as soon as every leaf has its gradient, of the one pass there is."""
        handles: list[Any] = []
        waiting = len(leaves.layers)

        def arrive(_: torch.Tensor) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                for handle in handles:
                    handle.remove()
                self.backward(leaves)

        if any(leaf.requires_grad for leaf in leaves.layers):
            handles += [leaf.register_post_accumulate_grad_hook(arrive) for leaf in leaves.layers]

    def backward(self, leaves: Features) -> None:
        """Run the tower backward, once, from what passes left at the leaves that `cut` returned."""
        pairs = [
            (layer, leaf.grad)
            for layer, leaf in zip(self.layers, leaves.layers, strict=True)
            if leaf is not layer and leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([own for own, _ in pairs], [gradient for _, gradient in pairs])


@dataclass(frozen=True)
class Patches:
    """Distinct images as a tower takes them, one behind the other.

    pixels: float32[n, values]. grids: int64[images, 3]. starts: first row of the features that an
    image has, by digest.
    """

    pixels: torch.Tensor
    grids: torch.Tensor
    starts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, images: Mapping[str, bytes], rules: ImageRules) -> Patches:
        """Decode at least one PNG, by digest. Raises InvalidImageError."""
        seen = [rules.patches(png) for png in images.values()]
        counts = [rules.count_tokens(grid) for _, grid in seen]
        return cls(
            torch.from_numpy(np.concatenate([patches for patches, _ in seen])),
            torch.tensor([grid for _, grid in seen]),
            dict(zip(images, itertools.accumulate(counts, initial=0), strict=False)),
        )

    @classmethod
    def blank(cls, rules: ImageRules) -> Patches:
        """Return an image of one token that no row shows."""
        side = rules.merge_size
        values = CHANNELS * rules.temporal_patch_size * rules.patch_size**2
        return cls(torch.zeros(side * side, values), torch.tensor([[1, side, side]]))

    def to(self, like: torch.Tensor | torch.device) -> Patches:
        """Return the same on a device; of a tensor also the type."""
        device = like.device if isinstance(like, torch.Tensor) else like
        return Patches(self.pixels.to(like), self.grids.to(device), self.starts)


@dataclass(frozen=True)
class VisionTower:
    """The `visual` module of a transformers model, and the rules of its pixels."""

    module: torch.nn.Module
    rules: ImageRules

    @classmethod
    def build(cls, config: Any, rules: ImageRules) -> VisionTower:
        """Make the tower alone, with weights that are to be loaded; `config` of the whole model."""
        kind = config.model_type
        source = f"transformers.models.{kind}.modeling_{kind}"
        made = getattr(importlib.import_module(source), FAMILIES[kind])
        return cls(made._from_config(config.vision_config), rules)

    @property
    def deep_layers(self) -> int:
        """Layers of the text behind which features are added."""
        return len(getattr(self.module, "deepstack_visual_indexes", ()))

    def encode(self, images: Mapping[str, bytes]) -> Features:
        """See every image, PNG by digest, in one pass. Raises InvalidImageError."""
        if not images:
            return Features()
        return self.see(Patches.read(images, self.rules).to(next(self.module.parameters())))

    def see(self, patches: Patches) -> Features:
        """See all images in one pass."""
        output = self.module(patches.pixels, grid_thw=patches.grids, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or ()
        return Features((output.pooler_output, *deep), patches.starts)
