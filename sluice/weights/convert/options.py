"""What a conversion is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.weights.convert.fp8 import ScaleFormat
from sluice.weights.convert.keys import Stacking

Format = Literal["hf", "torch_dist"]
Dtype = Literal["keep", "float32", "bfloat16", "float16"]


class OptionError(ValueError):
    """Options that do not go together; the message says which."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks that a torch_dist checkpoint is cut for. Any layout reads any other's."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint is converted.

    `model` holds the `config.json` (and tokenizer) where the source has none: a directory.
    `origin` is the HF checkpoint that fills in what training does not own: tensors whose names
    match a pattern (fnmatch) of `allow` and none of `deny`. `quantize`: FP8 weights in blocks.
    `fused_norms`: norms under the names that TransformerEngine's layers have. `max_file_bytes`:
    0 takes an eighth of the whole, from 256 MiB to 4 GiB, so that threads write to several files.
    """

    target_format: Format = "torch_dist"
    dtype: Dtype = "keep"
    model: Path | None = None
    origin: Path | None = None
    allow: tuple[str, ...] = ("*",)
    deny: tuple[str, ...] = ()
    quantize: bool = False
    scale_format: ScaleFormat = "float32"
    layout: Layout = Layout()
    vocab_multiple: int = 128
    stacking: Stacking = "auto"
    fused_norms: bool = True
    max_file_bytes: int = 0
    workers: int = 2
    sync: bool = True

    def file_bytes(self, total: int) -> int:
        """Largest size of a file of a checkpoint of `total` bytes."""
        return self.max_file_bytes or min(4 << 30, max(256 << 20, total // 8))

    def check(self) -> None:
        """Raises OptionError."""
        numbers = (*vars(self.layout).values(), self.vocab_multiple, self.workers)
        if min(numbers) < 1 or self.max_file_bytes < 0:
            raise OptionError("sizes of layouts and files, and workers, are at least 1")
        if self.target_format == "torch_dist" and (self.quantize or self.origin is not None):
            raise OptionError("origin and quantize are for HF checkpoints")
        if self.target_format == "hf" and self.layout != Layout():
            raise OptionError("an HF checkpoint is not cut for ranks")
        if self.quantize and self.dtype not in ("keep", "bfloat16"):
            raise OptionError("FP8 checkpoints keep the other tensors in bfloat16")
