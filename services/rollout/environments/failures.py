"""What the code of users raises, as an error that names it."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType

import grpc

from services.rollout.environments.environment import (
    SettingError,
    TaskError,
    UnknownEnvironmentError,
)
from sluice.runtime.errors import ServiceError

logger = logging.getLogger(__name__)


class EnvironmentFailedError(ServiceError):
    """An environment raised, or gave what makes no sense; the message says what."""

    code = grpc.StatusCode.INTERNAL
    reason = "ENVIRONMENT_FAILED"


class UserCode(AbstractContextManager[None]):
    """Around code of users in this process: what it raises becomes EnvironmentFailedError.

    What is typed already goes on as it is. Its TimeoutError must not look like a deadline of
    whoever waits for it, nor its `sys.exit` end this process.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ServiceError | SettingError | TaskError | UnknownEnvironmentError):
            return
        if isinstance(error, Exception | SystemExit):
            logger.error("%s failed", self._name, exc_info=error)
            raise EnvironmentFailedError(
                f"{self._name}: {type(error).__name__}: {error}", environment=self._name
            ) from error
