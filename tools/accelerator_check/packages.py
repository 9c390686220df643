"""What the check imports from outside, what of that is missing, and wheels that fill the gap."""

from __future__ import annotations

import ast
import importlib.util
import sys
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OWN = ("sluice", "services", "tools", "examples", "benchmarks")
NAMESPACES = ("google", "megatron")  # whose parts come with different distributions


class WheelError(Exception):
    """Wheels that would not do; the message says why."""


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack every wheel of `wheels` into the folder `target`; their file names.

    No installer is needed: what the check uses are wheels of plain files. Raises WheelError for
    one of another Python, and where there is none.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise WheelError(f"{wheels} holds no wheels; `make accelerator-wheels` fills it")
    for file in files:
        _check_python(file)
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        mark = target / f".{file.name}"
        if mark.exists():
            continue
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
        mark.touch()
    return [file.name for file in files]


def _check_python(wheel: Path) -> None:
    """A name ends with -python-abi-platform.whl; several of one kind are joined by dots."""
    python, abi, _ = wheel.stem.split("-")[-3:]
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if abi in ("none", "abi3") or here in python.split("."):
        return
    raise WheelError(
        f"{wheel.name} is for another Python than {sys.version_info.major}."
        f"{sys.version_info.minor}: make accelerator-wheels WHEELS_PYTHON="
        f"{sys.version_info.major}.{sys.version_info.minor}"
    )


def third_party(roots: Iterable[str]) -> dict[str, str]:
    """Packages from outside that `roots`, modules of this project, import: name -> first user.

    Imports of modules count, at any depth, and of functions of `examples` and of this package;
    what product code imports inside a function is an option of it.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _path(name)
        if path is None:
            continue
        waiting += [parent for parent in _parents(name) if parent not in seen]
        for imported in _imports(path):
            if imported.split(".")[0] in OWN:
                waiting.append(imported)
            elif (top := _distribution_root(imported)) not in sys.stdlib_module_names:
                found.setdefault(top, name)
    return found


def missing(names: Iterable[str]) -> list[str]:
    """Those that this interpreter does not find."""
    importlib.invalidate_caches()
    return sorted(name for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what is above it
        return False


def _distribution_root(imported: str) -> str:
    """The part of a dotted name that some distribution brings."""
    parts = imported.split(".")
    return ".".join(parts[:2]) if parts[0] in NAMESPACES else parts[0]


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _path(name: str) -> Path | None:
    """The file of a module of this project; None for a name inside one."""
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _imports(path: Path) -> tuple[str, ...]:
    tree = ast.parse(path.read_text())
    inside = path.is_relative_to(ROOT / "examples") or path.is_relative_to(ROOT / "tools")
    names: list[str] = []
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside:
            continue
        elif not isinstance(node, ast.Try):  # a package that code can do without
            nodes += ast.iter_child_nodes(node)
    return tuple(dict.fromkeys(names))
