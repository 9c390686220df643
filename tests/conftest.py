"""What tests need of the kernel."""

from __future__ import annotations

from functools import cache

import pytest

from sluice.sandbox.programs import REMEDY, SandboxUnavailableError, check_sandbox


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
