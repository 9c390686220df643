"""Requests of the converter to options, progress to metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from services.converter.errors import not_found
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.convert.control import Progress
from sluice.weights.convert.fp8 import ScaleFormat
from sluice.weights.convert.keys import Stacking
from sluice.weights.convert.options import ConvertOptions, Dtype, Format, Layout

K = TypeVar("K")
T = TypeVar("T")
_FORMATS: dict[pb.Format, Format] = {pb.FORMAT_HF: "hf", pb.FORMAT_TORCH_DIST: "torch_dist"}
_DTYPES: dict[pb.Dtype, Dtype] = {
    pb.DTYPE_UNSPECIFIED: "keep",
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_BFLOAT16: "bfloat16",
    pb.DTYPE_FLOAT16: "float16",
}
_STACKINGS: dict[pb.Stacking, Stacking] = {
    pb.STACKING_UNSPECIFIED: "auto",
    pb.STACKING_STACKED: "stacked",
    pb.STACKING_SINGLE: "single",
}
_SCALES: dict[pb.Quantization, ScaleFormat | None] = {
    pb.QUANTIZATION_UNSPECIFIED: None,
    pb.QUANTIZATION_FP8_BLOCK: "float32",
    pb.QUANTIZATION_FP8_BLOCK_UE8M0: "ue8m0",
}


class Paths:
    """Directories below the roots; nothing else is touched, links followed."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = [root.resolve() for root in roots]

    def existing(self, field: str, text: str) -> Path:
        """Raises InvalidFieldError or NotFoundError."""
        path = self.inside(field, text)
        if not path.is_dir():
            raise not_found(text)
        return path

    def inside(self, field: str, text: str) -> Path:
        """Raises InvalidFieldError."""
        if not text or not Path(text).is_absolute():
            raise InvalidFieldError(field, "is no absolute path")
        path = Path(text).resolve()
        if not any(path.is_relative_to(root) and path != root for root in self._roots):
            raise InvalidFieldError(field, "is not below a root of this converter")
        return path


def options_from_proto(
    request: pb.ConvertCheckpointRequest, paths: Paths, *, workers: int, sync: bool
) -> ConvertOptions:
    """Raises InvalidFieldError or NotFoundError."""
    scale = _known(_SCALES, request.quantization, "quantization")
    layout, origin = request.layout, request.origin
    return ConvertOptions(
        target_format=_known(_FORMATS, request.target_format, "target_format"),
        dtype=_known(_DTYPES, request.dtype, "dtype"),
        model=paths.existing("model", request.model) if request.model else None,
        origin=(
            paths.existing("origin.directory", origin.directory)
            if request.HasField("origin")
            else None
        ),
        allow=tuple(origin.allow) or ("*",),
        deny=tuple(origin.deny),
        quantize=scale is not None,
        scale_format=scale or "float32",
        layout=Layout(
            tensor=layout.tensor or 1, pipeline=layout.pipeline or 1, expert=layout.expert or 1
        ),
        vocab_multiple=request.vocab_multiple or 128,
        stacking=_known(_STACKINGS, request.stacking, "stacking"),
        fused_norms=not request.plain_norms,
        max_file_bytes=request.max_file_bytes,
        workers=workers,
        sync=sync,
    )


def write_progress(progress: Progress, metadata: pb.ConversionMetadata) -> None:
    """Bring `metadata` up to date."""
    metadata.byte_count, metadata.total_byte_count = progress.done_bytes, progress.total_bytes
    metadata.tensor_count = progress.done_tensors
    metadata.total_tensor_count = progress.total_tensors
    metadata.resumed_byte_count = progress.resumed_bytes
    metadata.ClearField("remaining")
    left = progress.seconds_left
    if left is not None and metadata.state == pb.CONVERSION_STATE_RUNNING:
        metadata.remaining.FromNanoseconds(int(left * 1e9))


def _known(table: Mapping[K, T], value: K, field: str) -> T:
    if value not in table:
        raise InvalidFieldError(field, "is unknown to this converter")
    return table[value]
