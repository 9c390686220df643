"""Wheels for a bare machine are refused when something would be missing there."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import accelerator_wheels
from tools.accelerator_check.packages import WheelError, third_party
from tools.accelerator_check.steps import STEPS
from tools.accelerator_wheels import USUALLY_THERE, check, needed, provided

PYTHON = "3.12"


def make_wheel(
    folder: Path, name: str, modules: Sequence[str], requires: Sequence[str] = ()
) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for module in modules:
            wheel.writestr(f"{module.replace('.', '/')}/__init__.py", "")
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


@pytest.fixture
def imported() -> list[str]:
    """What the check imports and is not usually there."""
    found = third_party(root for step in STEPS for root in step.roots)
    return sorted(set(found) - set(USUALLY_THERE) - {"yaml"})


def test_all_that_is_imported_must_be_in_a_wheel(tmp_path: Path, imported: list[str]) -> None:
    whole = make_wheel(tmp_path, "whole", imported)
    assert set(imported) < set(check([whole], PYTHON))
    part = make_wheel(tmp_path, "part", [name for name in imported if name != "grpc"])
    with pytest.raises(WheelError, match=r"nor usually there: grpc \(imported by \w"):
        check([part], PYTHON)


def test_what_is_usually_there_but_not_now_must_be_in_a_wheel_too(
    tmp_path: Path, imported: list[str]
) -> None:
    whole = make_wheel(tmp_path, "whole", imported)
    with pytest.raises(WheelError, match="nor usually there: pyarrow"):
        check([whole], PYTHON, also=["pyarrow"])


def test_what_a_wheel_needs_on_that_python_must_be_there(
    tmp_path: Path, imported: list[str]
) -> None:
    requires = ["numpy", "Deep_Down>=2", 'gone; python_version < "3.12"', 'more; extra == "x"']
    whole = make_wheel(tmp_path, "whole", imported, requires)
    assert needed([whole], PYTHON) == {"numpy", "deep-down"}
    assert "gone" in needed([whole], "3.11")
    with pytest.raises(WheelError, match="deep-down"):
        check([whole], PYTHON)
    check([whole, make_wheel(tmp_path, "deep_down", ["deep"])], PYTHON)


def test_wheels_that_are_too_much_to_carry_are_refused(
    tmp_path: Path, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_wheel(tmp_path, "whole", imported)
    monkeypatch.setattr(accelerator_wheels, "LIMIT_MB", 1e-6)
    with pytest.raises(WheelError, match="MB of wheels"):
        check([whole], PYTHON)


def test_compiled_modules_are_found_in_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "fast-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("_fast.cpython-312-x86_64-linux-gnu.so", "")
    assert "_fast" in provided([path])
