"""Every file, folder and name that a page speaks of is in the tree."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOPS = "sluice|services|protos|deploy|tests|tools|benchmarks|examples|docs"
FENCED = re.compile(r"```.*?```", re.DOTALL)
PATH = re.compile(rf"(?:{TOPS})/[\w./-]*")  # a path begins a code span or a link


def paths_of(text: str) -> set[str]:
    """Paths at the start of code spans and in links, without wildcards and placeholders."""
    spans = re.findall(r"`([^`\n]+)`", text)
    found = set()
    for span in spans:
        match = PATH.match(span)
        rest = span[match.end() :] if match else ""
        if match and not rest.startswith(("*", "<", "{", "[")):
            found.add(match.group().rstrip("."))
    return found


def names_of(text: str) -> set[tuple[str, str]]:
    """(path, name) of spans like `path.py::Name` and `path.py: Class.method`."""
    return set(re.findall(rf"`((?:{TOPS})/[\w./-]+\.py)(?:::|: )([A-Za-z_][\w.]*)`", text))


@cache
def definitions(path: Path) -> set[str]:
    """Names at the top of a module, and members of its classes as `Class.member`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m}" for m in map(_name, node.body) if m}
    return found


def _name(node: ast.stmt) -> str | None:
    return getattr(node, "name", None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_a_page_exists(page: Path) -> None:
    missing = [path for path in sorted(paths_of(page.read_text())) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_a_page_is_defined_where_it_says(page: Path) -> None:
    missing = [
        f"{path}: {name}"
        for path, name in sorted(names_of(page.read_text()))
        if name not in definitions(ROOT / path)
    ]
    assert not missing


def anchors_of(text: str) -> set[str]:
    """Names of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    lost = []
    for to in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        path, _, anchor = to.partition("#")
        target = page.parent / path if path else page
        if to.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            lost.append(to)
    assert lost == []


def citations_of(text: str) -> set[tuple[str, str]]:
    """(page, heading) where words of a program say `docs/page.md, Heading`."""
    return set(re.findall(r"(docs/[\w-]+\.md), ([A-Z][\w -]*)", text))


def test_every_heading_that_a_message_sends_to_is_on_its_page() -> None:
    lost = set()
    for file in [*(ROOT / "sluice").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for page, heading in citations_of(file.read_text()):
            if not anchors_of(f"# {heading}") <= anchors_of((ROOT / page).read_text()):
                lost.add((file.name, page, heading))
    assert lost == set()


def test_the_readme_leads_to_every_page() -> None:
    named = set(re.findall(r"`docs/([\w-]+\.md)`", PAGES[0].read_text()))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_page_of_the_api_has_every_call() -> None:
    """In the rows of its service: those with an empty first cell go on with the one above."""
    _, _, text = (ROOT / "docs" / "api.md").read_text().partition("## The calls")
    services = re.split(r"\n(?=\| [^|\s])", text.partition("\n## ")[0])
    lacking = []
    for file in sorted((ROOT / "protos").rglob("*_service.proto")):
        proto = file.read_text()
        (service,) = re.findall(r"^service (\w+)", proto, re.MULTILINE)
        for call in re.findall(r"^  rpc (\w+)", proto, re.MULTILINE):
            if not any(f"`{service}`" in rows and f"`{call}`" in rows for rows in services):
                lacking.append(f"{service}.{call}")
    assert lacking == []


def test_a_page_that_names_what_is_gone_is_noticed() -> None:
    """Negative control of both."""
    text = "`sluice/gone.py: run` and `sluice/cli.py::main`, `docs/*.md`, `python -m sluice`"
    assert paths_of(text) == {"sluice/gone.py", "sluice/cli.py"}
    assert names_of(text) == {("sluice/gone.py", "run"), ("sluice/cli.py", "main")}
    assert citations_of("(docs/gone.md, Some words)") == {("docs/gone.md", "Some words")}
    assert "main" in definitions(ROOT / "sluice/cli.py")
    assert "nothing" not in definitions(ROOT / "sluice/cli.py")
