"""House rules that no linter knows: device words, names, and who may catch everything."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEVICE_FREE = ("sluice/", "services/", "examples/")
DEVICE_FILES = {"sluice/platform.py"}
DEVICE_WORDS = re.compile(r"""["'](cuda|npu|nccl|hccl)["']|\.cuda\(|torch\.cuda""")
BROAD = {  # the servicers' last resort, and the process of a tracker, of whatever it raises
    "sluice/runtime/interceptors.py",
    "sluice/loop/tracking.py",
}
BAD_NAMES = re.compile(r"(utils?|helpers?|manager|misc)\.py$")


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(name) for name in listed.stdout.split() if not name.startswith("sluice/api/")]


def check(path: Path) -> list[str]:
    text = (ROOT / path).read_text()
    lines, name, found = text.splitlines(), str(path), []
    if BAD_NAMES.search(name):
        found.append(f"{name}: name it after what it holds")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and name not in BROAD and _is_broad(node):
            found.append(f"{name}:{node.lineno}: catches everything")
    if name.startswith(DEVICE_FREE) and name not in DEVICE_FILES:
        for number, line in enumerate(lines, 1):
            if DEVICE_WORDS.search(line):
                found.append(f"{name}:{number}: only sluice/platform.py knows devices")
    return found


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and does not raise it again; clean-up that does hides nothing."""
    last = handler.body[-1]
    named = getattr(handler.type, "id", "")
    everything = handler.type is None or named in ("Exception", "BaseException")
    return everything and not (isinstance(last, ast.Raise) and last.exc is None)


def main() -> int:
    problems = [problem for path in files() if (ROOT / path).exists() for problem in check(path)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
