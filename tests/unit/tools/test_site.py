"""The references of the site name every key, call, message and guide; nothing in them is a tag."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest
import yaml
from pydantic import BaseModel

from sluice.loop.config import RunConfig
from tools.site import CONFIGS, PACKAGES, ROOT, descriptors, models_in, pages, prose, type_text

PAGES = pages()
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def named(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for inner in nav.values():
            yield from named(inner)
    elif isinstance(nav, list):
        for inner in nav:
            yield from named(inner)


def below(model: type[BaseModel]) -> set[type[BaseModel]]:
    found, waiting = set(), [model]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            for field in current.model_fields.values():
                waiting += models_in(field.annotation)
    return found


def test_the_navigation_has_every_page_and_no_other() -> None:
    assert sorted(named(SITE["nav"])) == sorted(PAGES)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_file_is_there_with_its_description(name: str) -> None:
    text = PAGES[f"yaml/{name}.md"]
    for model in below(CONFIGS[name][0]):
        _, _, section = text.partition(f"## {model.__name__}\n")
        section = (section if model is not CONFIGS[name][0] else text).partition("\n## ")[0]
        for key, field in model.model_fields.items():
            (row,) = re.findall(rf"^\| `{key}` \|.*$", section, re.MULTILINE)
            assert len(re.findall(r"(?<!\\)\|", row)) == 5, row
            what = html.unescape(row.replace("\\", ""))
            assert " ".join((field.description or "").split()) in what
            assert field.is_required() == ("**required**" in row), row


def test_links_of_a_file_lead_to_its_parts() -> None:
    for name in CONFIGS:
        text = PAGES[f"yaml/{name}.md"]
        heads = {head.lower() for head in re.findall(r"^## (.+)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= heads


def test_every_call_and_message_of_the_api_is_there_with_its_comment() -> None:
    for file in descriptors():
        text = PAGES[f"api/{file.package.split('.')[2]}.md"]
        for service in file.service:
            for method in service.method:
                assert f"### {method.name}\n" in text
        for message in file.message_type:
            _, _, section = text.partition(f"### {message.name} {{ #{message.name.lower()} }}\n")
            rows = section.partition("\n### ")[0]
            for field in message.field:
                assert f"| `{field.name}` |" in rows, (message.name, field.name)
    assert "Registers the rows of a batch" in PAGES["api/trainer.md"]
    assert set(PACKAGES) == {file.package.split(".")[2] for file in descriptors()}


def test_types_and_prose_are_for_people() -> None:
    fields = RunConfig.model_fields
    assert type_text(fields["critic"].annotation) == "[CriticConfig](#criticconfig) or null"
    assert type_text(fields["surplus"].annotation) == "`again` or `drop`"
    assert type_text(fields["filters"].annotation) == "list of [FilterConfig](#filterconfig)"
    assert "map of names to [EnvironmentShare]" in type_text(fields["environments"].annotation)
    assert prose("a <b> [c] `<d> *`") == "a &lt;b> \\[c] `<d> *`"


def test_limits_and_words_come_from_their_pages() -> None:
    assert "Several adapters" in (ROOT / "docs" / "lora.md").read_text()
    limits = PAGES["limits.md"]
    assert "The fsdp backend" in limits and "`--reset-optimizer-states`" in limits
    assert "`--use-wandb`" not in limits  # which is there
    assert "| ledger |" in PAGES["glossary.md"] and "## Tests" not in PAGES["glossary.md"]
