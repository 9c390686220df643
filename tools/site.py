"""Makes the pages of the site in build/site-source: docs/, and references written from the code.

Needs `buf` and what the target `site` of the Makefile installs. mkdocs makes HTML of them.
"""

from __future__ import annotations

import enum
import inspect
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import google.api.field_behavior_pb2  # noqa: F401  options of fields, which descriptors have
from google.protobuf import descriptor_pb2 as pb
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.converter.servicer import ConverterConfig
from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.rollout.reward_model.config import RewardModelConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.loop.config import DpoConfig, RewardModelRunConfig, RunConfig, SftConfig
from sluice.stack import UpConfig
from tools.gen_protos import copy_googleapis

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
CONFIGS: dict[str, tuple[type[BaseModel], str]] = {
    "run": (RunConfig, "run.yaml of `sluice train` and `sluice eval`"),
    "sft": (SftConfig, "sft.yaml of `sluice sft`"),
    "dpo": (DpoConfig, "dpo.yaml of `sluice dpo`"),
    "reward_model_run": (RewardModelRunConfig, "reward_model.yaml of `sluice reward-model`"),
    "up": (UpConfig, "services.yaml of `sluice up`"),
    "trainer": (TrainerConfig, "trainer.yaml, or `config` of a trainer in services.yaml"),
    "rollout": (RolloutConfig, "rollout.yaml, or `config` of a rollout in services.yaml"),
    "reward_model": (
        RewardModelConfig,
        "reward_model.yaml, or `config` of a reward_model in services.yaml",
    ),
    "router": (RouterConfig, "router.yaml, or `config` of a router in services.yaml"),
    "converter": (ConverterConfig, "converter.yaml, or `config` of a converter in services.yaml"),
    "gateway": (GatewayConfig, "gateway.yaml, or `config` of a gateway in services.yaml"),
}
PACKAGES = ("trainer", "rollout", "router", "converter", "common")
REPEATED = pb.FieldDescriptorProto.LABEL_REPEATED


# YAML


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that values of a type may be, or hold."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def type_text(annotation: Any) -> str:
    """A type in words of YAML."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(each) for each in inner)
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_text(inner[0])}" if inner else "list"
    if origin in (dict, Mapping) or (inspect.isclass(origin) and issubclass(origin, Mapping)):
        return f"map of names to {type_text(inner[1])}"
    if origin is not None and inner:  # Annotated
        return type_text(inner[0])
    if annotation in (None, type(None)):
        return "null"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    if annotation in names:
        return names[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return " or ".join(f"`{value.value}`" for value in annotation)
    return "anything" if annotation is Any else f"`{getattr(annotation, '__name__', annotation)}`"


def default_text(field: FieldInfo) -> str:
    """What a key that is left out means."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its own defaults"
    if value is None:
        return "null"
    if isinstance(value, str | Path) and not str(value):
        return "empty"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"`{', '.join(map(str, value))}`" if value else "none"
    return f"`{value.value if isinstance(value, enum.Enum) else value}`".replace("True", "true")


def config_page(model: type[BaseModel], title: str) -> str:
    """Every key of a file, one table for each part of it."""
    parts, waiting = [], [model]
    seen: set[type[BaseModel]] = set()
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        parts.append(_config_table(current, title if current is model else ""))
        for field in current.model_fields.values():
            waiting += models_in(field.annotation)
    return "\n".join(parts)


def _config_table(model: type[BaseModel], title: str) -> str:
    head = f"# {title}\n" if title else f"## {model.__name__}\n"
    rows = ["| key | value | default | what |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        kind = type_text(field.annotation).replace("|", "\\|")
        limits = ", ".join(_limits(field))
        what = _cell(field.description or "")
        what = f"{what} {limits}".strip()
        default = default_text(field).replace("False", "false")
        rows.append(f"| `{name}` | {kind} | {default} | {what} |".replace("\n", " "))
    return "\n".join([head, prose(inspect.getdoc(model) or ""), "", *rows, ""])


def _limits(field: FieldInfo) -> Iterator[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    for limit in field.metadata:
        for name, sign in signs.items():
            if (value := getattr(limit, name, None)) is not None:
                yield f"{sign} {value}"
        if (least := getattr(limit, "min_length", None)) is not None:
            yield f"at least {least} long"


def _cell(text: str) -> str:
    return prose(" ".join(text.split())).replace("|", "\\|")


def prose(text: str) -> str:
    """Text of code for Markdown: what looks like a tag, or a link, is neither."""
    pieces = re.split(r"(`[^`]*`)", text)
    plain = (p.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*") for p in pieces[::2])
    pieces[::2] = list(plain)
    return "".join(pieces)


# API


def descriptors() -> list[pb.FileDescriptorProto]:
    """The files of protos/ with their comments. Raises CalledProcessError."""
    copy_googleapis()
    command = ["buf", "build", "protos", "-o", "-#format=binpb"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120)
    files = pb.FileDescriptorSet.FromString(built.stdout).file
    return [file for file in files if file.package.startswith("sluice.")]


class ProtoPages:
    """Pages of the API, one for each package."""

    def __init__(self, files: list[pb.FileDescriptorProto]) -> None:
        self._files = files
        self._pages: dict[str, str] = {}  # page by full name of a message or enum
        for file in files:
            for name, _, _ in _types(file):
                self._pages[name] = _page_of(file)

    def page(self, package: str) -> str:
        """Services first, then messages."""
        files = [file for file in self._files if _page_of(file) == package]
        lines = [f"# API: {package}", ""]
        for file in files:
            comments = _comments(file)
            for index, service in enumerate(file.service):
                lines += self._service(service, (6, index), comments)
        lines += ["## Messages", ""]
        for file in files:
            comments = _comments(file)
            for name, kind, path in _types(file):
                lines += self._message(name, kind, path, comments)
        return "\n".join(lines)

    def _service(
        self,
        service: pb.ServiceDescriptorProto,
        path: tuple[int, ...],
        comments: Mapping[tuple[int, ...], str],
    ) -> list[str]:
        lines = [f"## {service.name}", "", prose(comments.get(path, "")), ""]
        for index, method in enumerate(service.method):
            given = ("stream " if method.client_streaming else "") + self._link(method.input_type)
            answer = ("stream " if method.server_streaming else "") + self._link(method.output_type)
            lines += [f"### {method.name}", "", f"{given} → {answer}", ""]
            lines += [prose(comments.get((*path, 2, index), "")), ""]
        return lines

    def _message(
        self,
        name: str,
        kind: pb.DescriptorProto | pb.EnumDescriptorProto,
        path: tuple[int, ...],
        comments: Mapping[tuple[int, ...], str],
    ) -> list[str]:
        lines = [
            f"### {_short(name)} {{ #{_anchor(name)} }}",
            "",
            prose(comments.get(path, "")),
            "",
        ]
        if isinstance(kind, pb.EnumDescriptorProto):
            lines += ["| value | number | what |", "|---|---|---|"]
            for index, value in enumerate(kind.value):
                what = _cell(comments.get((*path, 2, index), ""))
                lines.append(f"| `{value.name}` | {value.number} | {what} |")
        elif kind.field:
            lines += ["| field | type | what |", "|---|---|---|"]
            entries = {n.name: n for n in kind.nested_type if n.options.map_entry}
            for index, field in enumerate(kind.field):
                what = _cell(comments.get((*path, 2, index), ""))
                lines.append(f"| `{field.name}` | {self._type(field, entries)} | {what} |")
        return [*lines, ""]

    def _type(
        self, field: pb.FieldDescriptorProto, entries: Mapping[str, pb.DescriptorProto]
    ) -> str:
        entry = entries.get(field.type_name.rpartition(".")[2])
        if entry is not None:
            key, value = (self._type(each, {}) for each in entry.field)
            return f"map of {key} to {value}"
        one = (
            self._link(field.type_name)
            if field.type_name
            else pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        )
        if field.label == REPEATED:
            return f"list of {one}"
        return f"{one}, optional" if field.proto3_optional else one

    def _link(self, type_name: str) -> str:
        name = type_name.removeprefix(".")
        page = self._pages.get(name)
        return f"`{name}`" if page is None else f"[{_short(name)}]({page}.md#{_anchor(name)})"


def _types(
    file: pb.FileDescriptorProto,
) -> Iterator[tuple[str, pb.DescriptorProto | pb.EnumDescriptorProto, tuple[int, ...]]]:
    """Messages and enums of a file, nested ones too: full name, descriptor, path of comments."""

    def inside(
        scope: str, message: pb.DescriptorProto, path: tuple[int, ...]
    ) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        name = f"{scope}.{message.name}"
        yield name, message, path
        for index, each in enumerate(message.enum_type):
            yield f"{name}.{each.name}", each, (*path, 4, index)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from inside(name, nested, (*path, 3, index))

    for index, message in enumerate(file.message_type):
        yield from inside(file.package, message, (4, index))
    for index, each in enumerate(file.enum_type):
        yield f"{file.package}.{each.name}", each, (5, index)


def _comments(file: pb.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {
        tuple(where.path): (where.leading_comments or where.trailing_comments).strip()
        for where in file.source_code_info.location
    }


def _page_of(file: pb.FileDescriptorProto) -> str:
    return file.package.split(".")[2]  # sluice.api.<package>.v1


def _short(name: str) -> str:
    return name.split(".v1.")[-1]


def _anchor(name: str) -> str:
    return _short(name).lower().replace(".", "-")


# Pages that others are made of


def index_page() -> str:
    """README.md without what leads elsewhere in the repository."""
    text = (ROOT / "README.md").read_text()
    return text[: text.index("## Read on")]


def glossary_page() -> str:
    """The words of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    words = text[text.index("## Words") :].removeprefix("## Words")
    return "# Glossary\n" + words[: words.index("\n## ")]


LIMITS = ("Not there", "What is refused")  # headings of guides


def limits_page() -> str:
    """What guides say is not there, and what other frameworks have and Sluice has not."""
    lines = ["# Limits", "", "Put together from the guides, each of which says more.", ""]
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            heading, _, body = section.partition("\n")
            if heading in LIMITS:
                what = heading.lower()
                lines += [f"## [{title}]({path.name}): {what}", "", body.strip(), ""]
    rows = [
        row
        for name in ("from-slime.md", "from-verl.md", "from-prime-rl.md")
        for row in (ROOT / "docs" / name).read_text().split("\n")
        if row.startswith("|") and "not there" in row
    ]
    lines += [
        "## Beside slime, verl and prime-rl",
        "",
        "Flags and keys of theirs that have no counterpart (all: [slime](from-slime.md), "
        "[verl](from-verl.md), [prime-rl](from-prime-rl.md)).",
        "",
        "| theirs | here |",
        "|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def guide(path: Path) -> str:
    """A page of docs/; what it links outside of it is named instead."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", path.read_text())


def pages() -> dict[str, str]:
    """Text of every page that is made, by its path."""
    made = {path.name: guide(path) for path in (ROOT / "docs").glob("*.md")}
    made |= {"index.md": index_page(), "glossary.md": glossary_page(), "limits.md": limits_page()}
    for name, (model, title) in CONFIGS.items():
        made[f"yaml/{name}.md"] = config_page(model, title)
    protos = ProtoPages(descriptors())
    for package in PACKAGES:
        made[f"api/{package}.md"] = protos.page(package)
    return made


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    shim, place = ROOT / "build" / "site-tools" / "package", SOURCE / "assets"
    place.mkdir(parents=True)
    shutil.copy(shim / "shim" / "index.js", place / "iframe-worker.js")
    shutil.copy(shim / "LICENSE", place / "iframe-worker.LICENSE.txt")
    for name, text in pages().items():
        path = SOURCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
