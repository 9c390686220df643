"""Errors that a rollout server answers with, each with its gRPC code and reason."""

from __future__ import annotations

import grpc

from sluice.runtime.errors import DataLossError, ServiceError


class NoWeightsError(ServiceError):
    """The engine has no weights yet: prepare and commit a version first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_WEIGHTS"


class NoTokenizerError(ServiceError):
    """Stop strings are looked for in text, and the engine has no tokenizer to make any."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_TOKENIZER"


class PromptTooLongError(ServiceError):
    """Prompt (and what is to follow it) does not fit the model length or the cache."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "PROMPT_TOO_LONG"


class DuplicateRequestError(ServiceError):
    """A request of this id waits or runs already."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_EXISTS"


class DigestMismatchError(DataLossError):
    """Weights are not those that were asked for; metadata names the tensor or file."""


class UnfitWeightsError(ServiceError):
    """A version cannot serve: files missing, malformed, or of another architecture."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNFIT_WEIGHTS"


class VersionUnavailableError(ServiceError):
    """The serving weights are outside the bounds of a request; metadata has both."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VERSION_UNAVAILABLE"


class AdapterBaseError(ServiceError):
    """An adapter is of another base than this engine has; metadata has the digests of both."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_BASE"


class OtherAdapterError(ServiceError):
    """A version is of another adapter of several than was named; metadata has whose it is."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "ADAPTER_MISMATCH"


class UnfitAdapterError(ServiceError):
    """An adapter cannot serve here: its tensors fit no layers, or the engine takes no such one."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNFIT_ADAPTER"


class MixedWeightsError(ServiceError):
    """Whole weights for an engine that serves adapters: these would lose their base."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "MIXED_WEIGHTS"


class WeightsPromisedError(ServiceError):
    """A version that was sent to engines is not in the store yet, for others to read."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WEIGHTS_PROMISED"


class StoreUnreachableError(ServiceError):
    """The weight store does not answer, or the disk is full; later it may."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "WEIGHT_STORE_UNREACHABLE"


class TransferFailedError(ServiceError):
    """A transfer group broke: a member is gone, late, or never came. A new group may work."""

    code = grpc.StatusCode.ABORTED  # not UNAVAILABLE: to ask again of this group is of no use
    reason = "TRANSFER_BROKEN"


class TransferGroupNotJoinedError(ServiceError):
    """The engine is in no transfer group of that name."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "TRANSFER_GROUP_NOT_JOINED"


class NoTransferError(ServiceError):
    """This engine takes weights from the store only."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NO_TRANSFER"


class VersionNotPreparedError(ServiceError):
    """Commit names a version that was not prepared, or that newer ones have displaced."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "VERSION_NOT_PREPARED"


class VersionNotCommittedError(ServiceError):
    """A version in the making was not committed in time; what was read of it is forgotten."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "VERSION_NOT_COMMITTED"


class UnsupportedModelError(ServiceError):
    """This engine cannot run the architecture; the message says why."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNSUPPORTED_MODEL"


class NonFiniteLogitsError(ServiceError):
    """The serving weights overflow or hold NaN; other weights may do."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NON_FINITE_LOGITS"


class MediaUnsupportedError(ServiceError):
    """A request or task holds images, audio or video, and nothing here can read them."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MEDIA_UNSUPPORTED"


class ImageProcessorError(ServiceError):
    """Images are prepared by other rules than the model's: it would see other pixels.

    Metadata has the digests of both, `expected` (the model's) and `actual`.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "IMAGE_PROCESSOR"


class ImageRefusedError(ServiceError):
    """An image of a prompt or an observation cannot be shown; `reason` says why.

    Those of `sluice.samples.images.InvalidImageError`, and IMAGE_NOT_FOUND, IMAGE_OUTSIDE (of the
    directories that may be read), IMAGE_ADDRESS (nothing is fetched), TOO_MANY_IMAGES and
    IMAGE_PLACES (placeholders are not as many as images). Metadata names the `field`.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message, field=field)
        self.reason = reason


class NoSleepError(ServiceError):
    """The engine cannot give up the memory of its device."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_SLEEP"


class NoProfileError(ServiceError):
    """What runs the model cannot record its passes."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_PROFILE"


class NotQuietError(ServiceError):
    """The engine must be paused and hold no request; a sleeping one must be woken first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NOT_QUIET"


class NoTopTokensError(ServiceError):
    """The engine scores tokens but cannot name the likeliest ones."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_TOP_TOKENS"


class NoMinTokensError(ServiceError):
    """The engine cannot keep a sample from ending."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NO_MIN_TOKENS"


class EngineFailedError(ServiceError):
    """A step of the engine raised, or it was closed; another replica may serve."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ENGINE_FAILED"
