"""A run whose services do not see its store is refused before it begins."""

from __future__ import annotations

from pathlib import Path

from sluice.store_check import FOLDER
from tests.e2e.conftest import Stack
from tests.patience import PATIENCE


def refusal(stack: Stack, name: str, **changes: object) -> str:
    training = stack.train(name, **changes)
    output, _ = training.process.communicate(timeout=PATIENCE)
    assert training.process.returncode == 2, output
    assert not training.rows()
    return " ".join(output.split())


def test_another_store_is_refused_by_name_of_process_and_place(
    stack: Stack, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    output = refusal(stack, "another store", store=str(tmp_path / "other"))
    own = stack.run_dir / "store"
    assert "store: " in output
    assert f"does not see what this process writes: its {own} is another one than" in output
    assert f"{tmp_path / 'other'} here" in output
    assert list((tmp_path / "other" / FOLDER).iterdir()) == []


def test_other_weights_are_refused_too(stack: Stack, tmp_path: Path) -> None:
    output = refusal(stack, "weights", weights=str(tmp_path / "weights"))
    assert "weights: " in output
    assert f"its {stack.run_dir / 'store' / 'weights'} is another one than" in output


def test_the_same_store_by_another_name_is_the_same(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(stack.run_dir / "store")
    stack.train("linked", steps=1, store=str(tmp_path / "link")).finish()
    assert list((stack.run_dir / "store" / FOLDER).iterdir()) == []
    assert list((stack.run_dir / "store" / "weights" / FOLDER).iterdir()) == []
