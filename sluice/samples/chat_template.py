"""Renders a model's chat template the way transformers does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What the operators and methods that a template uses raise for values of the wrong kind.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)


class ChatTemplateError(ValueError):
    """The template refuses these messages."""


_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class NoChatTemplateError(ChatTemplateError):
    """Messages were given, but the tokenizer has no chat template."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ChatTemplateError for what is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
            named = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ChatTemplateError(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._options = named - environment.globals.keys() - _GIVEN - special_tokens.keys()

    def check_options(self, names: Iterable[str]) -> None:
        """Raises ChatTemplateError for a name that is no variable of the template's own."""
        if unknown := sorted(set(names) - self._options):
            known = ", ".join(sorted(self._options)) or "none"
            raise ChatTemplateError(
                f"chat template: has no variable {unknown[0]!r}; its own: {known}"
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        opening: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation and, if `opening`, how the assistant's turn begins.

        `options` are variables of the template's own. Raises ChatTemplateError.
        """
        try:
            variables = {
                **(options or {}),
                **self._special_tokens,
                "messages": list(messages),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": opening,
            }
            return self._template.render(variables)
        except (jinja2.TemplateError, RecursionError, *_OF_VALUES) as error:
            raise ChatTemplateError(f"chat template: {error}") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
