"""Measures the grain of the code, and follows three things through it.

`python -m tools.house` prints one line over `sluice` and `services` without `sluice/api`:
files, lines of the median and the 90th-percentile file, modules that one other module imports
(but for `APART`), modules below 60 lines, class names that mean several things, the files that a
sample, a tensor and a lease pass (the lists in docs/architecture.md), and lines in all.

A list entry is `path.py: function` or `path.py: Class.method`; it must exist, and its module must
use the function of a neighbour or have its own used there. What carries any of the three, which
the table above the lists names, must exist too. Exit status 1 where one does not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SHORT = 60
WAYS = {"sample_files": "A sample", "tensor_files": "A tensor", "lease_files": "A lease"}
CARRIERS = "Three ways through the house"
CARRIER = re.compile(r"`(?P<path>[\w/]+\.py): (?P<name>[\w.]+)`")
ENTRY = re.compile(r"^\d+\. `(?P<path>[\w/]+\.py): (?P<name>[\w.]+)`", re.MULTILINE)

# Modules that stand apart though one place imports them: interfaces with several implementations
# and what implements them, tables of one family, algorithms with tests of their own.
APART = {
    "seams": (
        "services.trainer.backends.megatron.cpu",
        "services.rollout.episodes.bucket_journals",
        "services.trainer.controller.bucket_checkpoints",
        "sluice.samples.bucket_blobs",
        "sluice.weights.bucket",
    ),
    "families": (
        "sluice.weights.rules.deepseek_v3",
        "sluice.weights.rules.glm4",
        "sluice.weights.rules.llama",
        "sluice.weights.rules.qwen2",
        "sluice.weights.rules.qwen2_5_vl",
        "sluice.weights.rules.qwen3",
        "sluice.weights.rules.qwen3_5",
        "sluice.weights.rules.qwen3_moe",
    ),
    "algorithms": (
        "sluice.algo.advantages",
        "sluice.algo.correction",
        "sluice.algo.evaluation",
        "sluice.algo.layout",
        "sluice.balance.planner_packing",
        "sluice.balance.routing.settling",
        "sluice.weights.rules.packing",
    ),
}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def line_count(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def class_names(self) -> list[str]:
        """At the top of the module, read without its tree; what looks like one in a text too."""
        return re.findall(r"^class (\w+)", self.text, re.MULTILINE)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def definitions(self) -> set[str]:
        """Functions, classes and methods, as `name` and `Class.method`."""
        found = set()
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                for item in ast.walk(node):
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        found.add(f"{node.name}.{item.name}")
        return found

    @cached_property
    def used_names(self) -> set[str]:
        """Identifiers and attributes that the module mentions, its own definitions aside."""
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self.tree):  # what is named in an import or started as a process
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= set(re.findall(r"\w+", node.value))
        return names


def load_modules(root: Path = ROOT) -> dict[str, Module]:
    """Modules by dotted name."""
    modules = {}
    for top in ("sluice", "services"):
        for path in sorted((root / top).rglob("*.py")):
            inside = path.relative_to(root)
            if inside.parts[:2] == ("sluice", "api"):
                continue
            name = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            modules[name] = Module(name, path)
    return modules


def importers(modules: dict[str, Module]) -> dict[str, set[str]]:
    """By module: the modules that import it or something of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for node in ast.walk(module.tree):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [name if name in modules else node.module for name in full]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            for target in targets:
                if target in modules and target != module.name:
                    found[target].add(module.name)
    return found


def single_importers(modules: dict[str, Module]) -> list[str]:
    """Modules that exactly one other imports, `APART` left out."""
    apart = {name for names in APART.values() for name in names}
    found = importers(modules)
    return [
        name
        for name, module in modules.items()
        if len(found[name]) == 1 and not module.is_package and name not in apart
    ]


def names_twice(modules: dict[str, Module]) -> dict[str, list[str]]:
    """Class names defined in several modules, unless all but one implement that one.

    An implementation names the other among its bases, or has every member of a Protocol.
    """
    places: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    counts = Counter(name for module in modules.values() for name in module.class_names)
    for module in modules.values():
        if all(counts[name] == 1 for name in module.class_names):
            continue
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((module.name, node))
    return {
        name: [module for module, _ in found]
        for name, found in places.items()
        if len(found) > 1
        and sum(not _implements(node, name, [other for _, other in found]) for _, node in found) > 1
    }


def _implements(node: ast.ClassDef, name: str, others: list[ast.ClassDef]) -> bool:
    if name in _bases(node):
        return True
    protocols = [other for other in others if other is not node and "Protocol" in _bases(other)]
    return any(_members(protocol) <= _members(node) for protocol in protocols)


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, annotated names and what is assigned to `self`."""
    members = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            members.add(item.target.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            members.add(item.attr)
    return members


@dataclass(frozen=True)
class Entry:
    """One function that a thing passes."""

    path: str
    name: str

    def module(self, modules: dict[str, Module]) -> Module | None:
        return modules.get(".".join(Path(self.path).with_suffix("").parts))

    @property
    def called(self) -> str:
        """The name under which others call it; a constructor by its class."""
        owner, _, last = self.name.rpartition(".")
        return owner.rpartition(".")[2] if last == "__init__" else last


def read_ways(page: str) -> dict[str, list[Entry]]:
    """The entries of each list, by the key of the summary line."""
    ways = {}
    for key, title in WAYS.items():
        _, found, rest = page.partition(f"\n## {title}")
        section = rest.partition("\n## ")[0] if found else ""
        ways[key] = [Entry(match["path"], match["name"]) for match in ENTRY.finditer(section)]
    return ways


def read_carriers(page: str) -> list[Entry]:
    """The functions that carry whatever passes, of the table above the lists."""
    section = page.partition(f"\n## {CARRIERS}")[2].partition("\n## ")[0]
    return [Entry(match["path"], match["name"]) for match in CARRIER.finditer(section)]


def broken_entries(way: list[Entry], modules: dict[str, Module]) -> list[str]:
    """What is wrong with a list, one line each."""
    found = []
    for index, entry in enumerate(way):
        module = entry.module(modules)
        if module is None or entry.name not in module.definitions:
            found.append(f"{entry.path}: {entry.name} does not exist")
            continue
        neighbours = way[max(index - 1, 0) : index] + way[index + 1 : index + 2]
        if neighbours and not any(_linked(entry, other, modules) for other in neighbours):
            found.append(f"{entry.path}: {entry.name} neither calls its neighbours nor is called")
    return found


def missing_carriers(page: str, modules: dict[str, Module]) -> list[str]:
    """Carriers that do not exist, one line each."""
    return [
        f"{entry.path}: {entry.name} does not exist"
        for entry in read_carriers(page)
        if (module := entry.module(modules)) is None or entry.name not in module.definitions
    ]


def _linked(one: Entry, other: Entry, modules: dict[str, Module]) -> bool:
    first, second = one.module(modules), other.module(modules)
    if first is None or second is None:
        return False
    return other.called in first.used_names or one.called in second.used_names


def summary(modules: dict[str, Module], ways: dict[str, list[Entry]]) -> str:
    lines = sorted(module.line_count for module in modules.values())
    figures = {
        "files": len(lines),
        "median": lines[len(lines) // 2],
        "p90": lines[int(len(lines) * 0.9)],
        "single_importer": len(single_importers(modules)),
        "under60": sum(m.line_count < SHORT for m in modules.values() if not m.is_package),
        "names_twice": len(names_twice(modules)),
        **{key: len({entry.path for entry in way}) for key, way in ways.items()},
        "lines": sum(lines),
    }
    return "house: " + " ".join(f"{key}={value}" for key, value in figures.items())


def main() -> int:
    modules, page = load_modules(), PAGE.read_text()
    ways = read_ways(page)
    if "--list" in sys.argv:  # what the figures count
        for name in single_importers(modules):
            print(f"one importer: {name} ({modules[name].line_count} lines)")
        for name, module in modules.items():
            if module.line_count < SHORT and not module.is_package:
                print(f"short: {name} ({module.line_count} lines)")
        for name, places in names_twice(modules).items():
            print(f"twice: {name} in {', '.join(places)}")
    broken = [problem for way in ways.values() for problem in broken_entries(way, modules)]
    broken += missing_carriers(page, modules)
    print("\n".join(broken), file=sys.stderr, end="\n" if broken else "")
    print(summary(modules, ways))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
