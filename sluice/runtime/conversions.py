"""What conversions and comparisons came to, as the API says it; for the service and the command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.api.converter.v1 import converter_service_pb2 as pb

if TYPE_CHECKING:  # they import torch
    from sluice.weights.convert.conversion import Result
    from sluice.weights.convert.verify import Comparison


def result_to_proto(result: Result) -> pb.ConvertCheckpointResponse:
    """The answer to a conversion, or to its validation."""
    report = result.report
    return pb.ConvertCheckpointResponse(
        target=str(result.target),
        byte_count=result.size,
        largest_group_byte_count=result.largest_group,
        report=pb.ConversionReport(
            converted=report.converted,
            copied=report.copied,
            skipped=report.skipped,
            conflicting=report.conflicting,
        ),
        digests=result.digests,
    )


def comparison_to_proto(comparison: Comparison) -> pb.VerifyCheckpointResponse:
    """The answer to a comparison."""
    return pb.VerifyCheckpointResponse(
        equal=comparison.same,
        equal_count=comparison.equal,
        different=comparison.different,
        only_first=comparison.only_first,
        only_second=comparison.only_second,
        byte_count=comparison.size,
    )
