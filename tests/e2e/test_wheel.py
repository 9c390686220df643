"""From an empty folder with the wheel alone: demo, init, doctor, status, report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the wheel, and dependencies from this one's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    for name in listed:  # as it is here, and nothing that a build left in it
        if name.startswith(("sluice/", "services/", "README", "pyproject", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    built = run(
        *(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source), cwd=folder
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("sluice-*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    placed = run(
        *(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel), cwd=folder
    )
    assert placed.returncode == 0, placed.stderr
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=folder).stdout.strip())
    # a path alone: an editable install in there stays without effect
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_a_wheel_alone_is_enough(installed: Path, tmp_path: Path) -> None:
    sluice = installed / "sluice"
    where = run(
        installed / "python", "-c", "import sluice.cli as c; print(c.__file__)", cwd=tmp_path
    )
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
    done = run(sluice, "init", run_dir / "model", run_dir / "prompts.jsonl", cwd=tmp_path)
    assert done.returncode == 2  # 256 tokens are more than the tiny model takes
    done = run(
        *(sluice, "init", run_dir / "model", run_dir / "prompts.jsonl", "--max_new_tokens", "5"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load((tmp_path / "services.yaml").read_text())
    assert services["services"]["trainer"]["config"]["model"] == str(run_dir / "model")
