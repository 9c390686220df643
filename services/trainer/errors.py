"""What a caller of the trainer can get wrong or run into, by code and reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.rpc import error_details_pb2, status_pb2

from sluice.runtime.errors import ServiceError


class ColumnMissingError(ServiceError):
    """A row lacks columns that the loss or the estimator reads."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "COLUMN_MISSING"

    def __init__(self, columns: list[str], sample_id: str, reader: str) -> None:
        names = ", ".join(columns)
        super().__init__(
            f"sample {sample_id!r} lacks {names}, which {reader} reads",
            columns=",".join(columns),
            sample_id=sample_id,
        )


class TemperatureMismatchError(ServiceError):
    """Rows were sampled at another temperature than a pass over them is asked for."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TEMPERATURE_MISMATCH"


class RoutingMissingError(ServiceError):
    """A row has no routed experts to replay, or has them for other tokens or layers."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ROUTING_MISSING"


class ReferenceFixedError(ServiceError):
    """The reference cannot be a version of the weights; the message says why."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "REFERENCE_FIXED"


class TransferDisabledError(ServiceError):
    """Engines were named to a trainer that keeps nothing to send."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TRANSFER_DISABLED"


class MixedPublicationError(ServiceError):
    """A store holds whole weights and the trainer publishes adapters, or the other way round."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MIXED_WEIGHTS"


class UnquantizableWeightsError(ServiceError):
    """Weights that a quantisation has no numbers or no layout for; metadata names the tensor."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNQUANTIZABLE_WEIGHTS"


class OversizeSampleError(ServiceError):
    """A row is longer than a micro-batch may be, and the policy does not admit it.

    Or than the positions that a model has `learned`. A row of no batch has no sample_id; its
    position names it.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "OVERSIZE_SAMPLE"

    def __init__(
        self, sample_id: str, row: int, length: int, cap: int, *, learned: bool = False
    ) -> None:
        name: dict[str, str | int] = {"sample_id": sample_id} if sample_id else {"row": row}
        what = f"sample {sample_id!r}" if sample_id else f"row {row}"
        limit = (
            f"the model has learned {cap} positions: have engines end there "
            "(engine.max_model_length), or set oversize_policy: truncate"
            if learned
            else f"a micro-batch holds {cap}: give the trainer more (max_tokens_per_micro_batch), "
            "or an oversize_policy: truncate, or alone"
        )
        super().__init__(
            f"{what} has {length} tokens, {limit}",
            length=length,
            cap=cap,
            **name,
        )


class PartReusedError(ServiceError):
    """A part id came before in this step with another body."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "PART_REUSED"


class WrongHeadError(ServiceError):
    """A critic was asked for log-probabilities, or a policy for values."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_HEAD"


class PartsMismatchError(ServiceError):
    """The gathered parts are not those the caller expects."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PARTS_MISMATCH"

    def __init__(self, expected: list[str], gathered: list[str]) -> None:
        super().__init__(
            f"expected parts {expected}, gathered {gathered}",
            expected=",".join(expected),
            gathered=",".join(gathered),
        )


class NoGradientsError(ServiceError):
    """A step was asked for, but nothing was gathered."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_GRADIENTS"


class AggregationMismatchError(ServiceError):
    """Parts of one step are averaged in different ways."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "AGGREGATION_MISMATCH"


class GradientsIncompleteError(ServiceError):
    """A pass failed midway: nobody knows what the gradients hold until they are discarded."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "GRADIENTS_INCOMPLETE"


class TrainerAsleepError(ServiceError):
    """The model is not on the device until the trainer is woken."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TRAINER_ASLEEP"


class AdaptersUnsupportedError(ServiceError):
    """The trainer trains a model itself."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTERS_UNSUPPORTED"


class AdapterLimitError(ServiceError):
    """There are as many adapters as the settings allow; DeleteAdapter makes room."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "ADAPTER_LIMIT"


class AdapterMismatchError(ServiceError):
    """A pass names another adapter than its batch is for."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_MISMATCH"

    def __init__(self, batch: str, owner: str, named: str) -> None:
        whose, asked = (f"adapter {n!r}" if n else "the policy" for n in (owner, named))
        super().__init__(
            f"{batch} is for {whose}, and {asked} is named", batch=batch, owner=owner, named=named
        )


class CallExpiredError(ServiceError):
    """The turn of a call came when its caller waited no longer: nothing was done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "CALL_EXPIRED"


class SkippedTooOftenError(ServiceError):
    """Too many optimizer steps in a row were skipped."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "SKIPPED_TOO_OFTEN"


class CheckpointMismatchError(ServiceError):
    """A checkpoint is of another backend, model or layout than this trainer's."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CHECKPOINT_MISMATCH"


class CheckpointDamagedError(ServiceError):
    """A file of a checkpoint is missing, or is not what was written."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "CHECKPOINT_DAMAGED"

    def __init__(self, file: str, detail: str) -> None:
        super().__init__(f"the checkpoint is damaged: {detail}", file=file)


class StoreRefusedError(ServiceError):
    """The disk is full, read-only or gone; the message is the system's, and names the file."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STORE_FAILED"


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of files in the block into StoreRefusedError; those of no file fly on."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        error.filename = str(error.filename)  # of a path the system tells the class too
        raise StoreRefusedError(str(error), file=error.filename) from error


class OutOfMemoryError(ServiceError):
    """There is no memory for what was asked, of a rank's device or its host.

    Of a pass that means that nothing is left to cut: micro-batches have been made smaller before.
    Metadata of a rank's own answer has what was `allocated`, `free` and in `total`, in bytes; where
    much lies `in_pieces` between what is in use, also what would be `joining` those.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"


class MicroBatchesCutError(ServiceError):
    """A pass took more memory than there is, and micro-batches are smaller from now on.

    What is gathered so far has to be discarded, and all of it added again.
    """

    code = grpc.StatusCode.UNAVAILABLE
    reason = "MICRO_BATCHES_CUT"


class CommandTooLargeError(ServiceError):
    """A micro-batch of too many rows: `max_tokens_per_micro_batch` is too large for them."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "COMMAND_TOO_LARGE"


class RankLostError(ServiceError):
    """A rank died or hung; the group restarts.

    lacked_memory: for want of memory, which the next ranks lack too for the same work.
    """

    code = grpc.StatusCode.UNAVAILABLE
    reason = "RANK_LOST"

    def __init__(self, rank: int, detail: str, *, lacked_memory: bool = False) -> None:
        super().__init__(f"rank {rank} {detail}", rank=rank)
        self.rank, self.lacked_memory = rank, lacked_memory


class RanksPartedError(ServiceError):
    """Ranks lost the connections they compute over: all restart, as where one of them dies."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "RANK_LOST"


class TrainerFailedError(ServiceError):
    """The ranks could not be started, or died too often."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TRAINER_FAILED"


class RankError(ServiceError):
    """What a rank answered in place of a result."""

    def __init__(self, rank: int, status: status_pb2.Status) -> None:
        detail = error_details_pb2.ErrorInfo()
        for packed in status.details:
            if packed.Unpack(detail):
                break
        super().__init__(f"rank {rank}: {status.message}", **{**detail.metadata, "rank": rank})
        self.rank, self.said = rank, status.message
        self.code = _CODES[status.code]
        self.reason = detail.reason or "INTERNAL"
        self.lacked_memory = self.reason == OutOfMemoryError.reason


_CODES = {code.value[0]: code for code in grpc.StatusCode}
