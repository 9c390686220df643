"""What the gateway refuses."""

from __future__ import annotations

import grpc

from sluice.runtime.errors import RemoteError, ServiceError


class RefusedError(ServiceError):
    """A request that no repeat makes right; the message names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "REFUSED"


class GoneError(ServiceError):
    """A model, a session or an answer that is not kept any more."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "GONE"


class SkippedStepError(ServiceError):
    """The optimizer took no step: gradients were no numbers, or too large."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_SKIPPED"


class OutOfOrderError(ServiceError):
    """A request whose place in the order was not reached: one before it never came."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "OUT_OF_ORDER"


class UnfitEnginesError(ServiceError):
    """No engine takes such an adapter, however often it is asked."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNFIT_ADAPTER"


class JournalDamagedError(ServiceError):
    """Something is not as it was written to the journal."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "JOURNAL_DAMAGED"


# Codes of errors that come of what was asked for, and not of the state of the services.
OWN_FAULT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


OF_SERVICES = frozenset({"QUEUE_FULL", "STORE_FAILED", "TRAINER_ASLEEP", "TRAINER_FAILED"})


def is_own_fault(error: ServiceError | RemoteError) -> bool:
    """Whether the caller is to change something, rather than to try again."""
    return error.code in OWN_FAULT and error.reason not in OF_SERVICES
