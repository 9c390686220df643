"""How a checkpoint is converted: the options of the library, the service and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from sluice.config import Config
from sluice.place import StorePlace
from sluice.weights.convert.quantized_layout import Quantization

Stacking = Literal["auto", "stacked", "single"]
_DESCRIBED = {"": "float32", "fp8": "float32", "fp8_ue8m0": "ue8m0"}  # as earlier releases had it


class OptionError(ValueError):
    """Options that do not go together; the message says which."""


class Layout(Config):
    """Ranks that a torch_dist checkpoint is cut for. Any layout reads any other's."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


class ConvertOptions(Config):
    """Options of a conversion. Patterns are those of fnmatch."""

    to: Literal["hf", "torch_dist", "peft"] = Field("torch_dist", description="Format of DST.")
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    model: Path | None = Field(None, description="Directory with config.json, if SRC has none.")
    origin: Path | None = Field(None, description="HF checkpoint that fills in what SRC lacks.")
    allow: list[str] = Field(["*"], description="Patterns of names to take from the origin.")
    deny: list[str] = Field([], description="Patterns of names not to take from the origin.")
    quantize: Quantization = Field(
        "", description="FP8 in blocks of 128, or experts in INT4 in groups of 32 or 128."
    )
    layout: Layout = Layout()
    vocab_multiple: int = 128
    stacking: Stacking = "auto"
    plain_norms: bool = Field(False, description="Norms named as without TransformerEngine.")
    max_file_bytes: int = Field(0, description="0 is chosen by the size of the whole.")
    workers: int = Field(2, description="Threads, which write to several files at a time.")
    sync: bool = Field(True, description="Files are on the disk before DST appears.")

    def file_bytes(self, total: int) -> int:
        """Return the largest size of a file of a checkpoint of `total` bytes."""
        return self.max_file_bytes or min(4 << 30, max(256 << 20, total // 8))

    def check(self) -> None:
        """Raise OptionError for options that do not go together."""
        numbers = (*dict(self.layout).values(), self.vocab_multiple, self.workers)
        if min(numbers) < 1 or self.max_file_bytes < 0:
            raise OptionError("sizes of layouts and files, and workers, are at least 1")
        if self.to == "torch_dist" and (self.quantize or self.origin is not None):
            raise OptionError("origin and quantize are for HF checkpoints")
        if self.to != "torch_dist" and self.layout != Layout():
            raise OptionError("an HF checkpoint is not cut for ranks")
        if not self.allow:
            raise OptionError("allow is empty, so that origin would give nothing: leave out origin")
        if self.quantize and self.dtype not in ("keep", "bfloat16"):
            raise OptionError("quantised checkpoints keep the other tensors in bfloat16")

    def describe(self) -> dict[str, object]:
        """Return what decides about the bytes of the target, as `conversion.json` keeps it."""
        return {
            "target_format": self.to,
            "dtype": self.dtype,
            "model": self.model and str(self.model.resolve()),
            "origin": self.origin and str(self.origin.resolve()),
            "allow": self.allow,
            "deny": self.deny,
            "quantize": bool(self.quantize),
            "scale_format": _DESCRIBED.get(self.quantize, self.quantize),
            "layout": dict(self.layout),
            "vocab_multiple": self.vocab_multiple,
            "stacking": self.stacking,
            "fused_norms": not self.plain_norms,
            "max_file_bytes": self.max_file_bytes,
        }


class PlacedOptions(ConvertOptions):
    """The same where directories may be prefixes of a bucket."""

    model: StorePlace | None = Field(  # type: ignore[assignment]
        None, description="Directory or s3:// URL with config.json, if SRC has none."
    )
    origin: StorePlace | None = Field(  # type: ignore[assignment]
        None, description="HF checkpoint that fills in what SRC lacks."
    )
