"""What tests need of the kernel, and how long they keep what they share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from sluice.runtime.channel import DEADLINES
from sluice.sandbox.programs import REMEDY, SandboxUnavailableError, check_sandbox
from tests import warm
from tests.patience import PATIENCE


@cache
def refusal() -> str:
    """Why this machine isolates no program; empty where it does."""
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        return str(error)
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Where the kernel isolates no program, a test of isolated ones is that none is run."""
    if pyfuncitem.get_closest_marker("isolation") is None or not refusal():
        return None
    assert REMEDY in refusal()
    return True


# An example takes what it takes on a machine under load; a test is ended by `timeout`.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start every service afresh; see tests/warm.py"
    )


COLOURED = ("FORCE_COLOR", "TTY_COMPATIBLE")  # have Rich take a pipe for a terminal


def pytest_configure(config: pytest.Config) -> None:
    """A plugin of its own: hooks of this file are not asked about fixtures of a session."""
    config.pluginmanager.register(EndsWithDirectory())
    for name in COLOURED:
        os.environ.pop(name, None)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup no process would be ended by it
    if sys.platform == "linux" and not config.getoption("--cold"):
        warm.begin()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they import stay to the end: garbage is not looked for among them.

    Nor while they are made, which is a sixth of the time that it takes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


class EndsWithDirectory:
    """What the tests of a directory share ends with the last of them: a stack takes gigabytes.

    Scope `package` says that of a directory with an `__init__.py` alone.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: Any
    ) -> Generator[None, object, object]:
        made = yield
        if fixturedef.scope == "session":
            for node in request._pyfuncitem.iter_parents():
                if isinstance(node, pytest.Dir) and node.nodeid == fixturedef.baseid:
                    node.addfinalizer(partial(fixturedef.finish, request=request))
        return made


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a command that runs in the process of a test makes of the log is no later test's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Whoever asks how a service does waits for the answer, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for method in ("GetTrainer", "GetEngine", "ListEngines", "ListWaits"):
            patch.setitem(DEADLINES, method, PATIENCE)
        yield
