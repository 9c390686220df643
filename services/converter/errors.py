"""What a converter refuses or runs into, by gRPC code and reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.converter import metrics
from sluice.runtime.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidFieldError,
    NotFoundError,
    ServiceError,
)
from sluice.weights.convert.errors import (
    BusyTargetError,
    ConflictingTensorError,
    DiskFullError,
    TargetExistsError,
)
from sluice.weights.convert.options import OptionError
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    ManifestError,
    MissingTensorError,
    TensorDigestError,
    UnexpectedTensorError,
    WeightStoreError,
)
from sluice.weights.rules import PartitionError


class UnfitCheckpointError(ServiceError):
    """A source is not what the conversion needs; metadata names tensors."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNFIT_CHECKPOINT"


class TargetBusyError(ServiceError):
    """Another conversion writes the same target."""

    code = grpc.StatusCode.ABORTED
    reason = "TARGET_BUSY"


class UnusablePathError(ServiceError):
    """The operating system refuses: no permission, no directory, a failing disk."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNUSABLE_PATH"


class DiskTooSmallError(ServiceError):
    """The target does not fit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_FULL"


@contextmanager
def typed_errors() -> Iterator[None]:
    """Errors of conversions as those of the service."""
    try:
        yield
    except OptionError as error:
        raise InvalidFieldError("request", str(error)) from error
    except PartitionError as error:
        raise InvalidFieldError("layout", str(error)) from error
    except TargetExistsError as error:
        raise AlreadyExistsError("checkpoint", error.target.name) from error
    except BusyTargetError as error:
        raise TargetBusyError(str(error), target=error.target.name) from error
    except DiskFullError as error:
        raise DiskTooSmallError(str(error), needed=error.needed) from error
    except TensorDigestError as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), tensor=error.name) from error
    except (FileDigestError, DamagedFileError) as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), file=error.file_name) from error
    except ManifestError as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), file="manifest.json") from error
    except (MissingTensorError, UnexpectedTensorError) as error:
        raise UnfitCheckpointError(str(error), tensors=",".join(error.names[:64])) from error
    except ConflictingTensorError as error:
        names = f"{error.name},{error.other}"
        raise UnfitCheckpointError(str(error), tensors=names) from error
    except WeightStoreError as error:
        raise UnfitCheckpointError(str(error)) from error
    except OSError as error:
        raise UnusablePathError(str(error), file=error.filename or "") from error


def not_found(path: str) -> NotFoundError:
    """No such directory."""
    return NotFoundError("checkpoint", path)
