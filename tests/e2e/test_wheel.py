"""From an empty folder with the wheel of the sdist alone: demo, init, doctor, status, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
BACKEND = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is packed, as it is here, and nothing that a build left in it."""
    source = tmp_path_factory.mktemp("packed") / "source"
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    for name in listed:
        if name.startswith(("sluice/", "services/", "README", "pyproject", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    built = run(sys.executable, "-c", BACKEND.format("sdist"), folder, cwd=tree)
    assert built.returncode == 0, built.stderr
    (archive,) = folder.glob("sluice-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the tools of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        *(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist), cwd=folder
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("sluice-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin directory of an environment with the wheel, and dependencies from this one's."""
    folder = wheel.parent
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    placed = run(
        *(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel), cwd=folder
    )
    assert placed.returncode == 0, placed.stderr
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=folder).stdout.strip())
    # a path alone: an editable install in there stays without effect
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_sdist_and_tree_give_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    def contents(path: Path) -> dict[str, int]:
        with zipfile.ZipFile(path) as archive:
            return {each.filename: each.CRC for each in archive.infolist()}

    built = run(sys.executable, "-c", BACKEND.format("wheel"), tmp_path, cwd=tree)
    assert built.returncode == 0, built.stderr
    (other,) = tmp_path.glob("sluice-*.whl")
    of_sdist, of_tree = contents(wheel), contents(other)
    # the one lists the other's files in an order of its own
    records = {name for name in of_tree if name.endswith(".dist-info/RECORD")}
    assert of_sdist.keys() == of_tree.keys()
    assert {n for n in of_tree if of_tree[n] != of_sdist[n]} <= records
    packed = {
        str(path.relative_to(tree))
        for package in ("sluice", "services")
        for path in (tree / package).rglob("*")
        if path.is_file()
    }
    assert "sluice/loop/run_page/page.css" in packed
    assert packed <= of_sdist.keys()


def test_a_wheel_alone_is_enough(installed: Path, tmp_path: Path) -> None:
    sluice = installed / "sluice"
    where = run(installed / "python", "-c", "import sluice; print(sluice.__file__)", cwd=tmp_path)
    assert str(installed.parent) in where.stdout, where.stderr
    done = run(sluice, "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok       store" in done.stdout
    done = run(sluice, "demo", "--steps", "2", "--target", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("demo: reward first=")
    run_dir = tmp_path / "runs" / "demo"
    done = run(sluice, "status", run_dir, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["run"]["state"], found["run"]["step"]) == ("done", 2)
    done = run(sluice, "report", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (run_dir / "report.html").read_text()
    assert "smoothed" in page  # its scripts came with the wheel
    done = run(sluice, "trace", run_dir, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(
        *(sluice, "init", run_dir / "model", run_dir / "prompts.jsonl", "--max_new_tokens", "5"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load((tmp_path / "services.yaml").read_text())
    assert services["services"]["trainer"]["config"]["model"] == str(run_dir / "model")
