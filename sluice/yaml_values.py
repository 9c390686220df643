"""Values as YAML has them: every text of a user is read here, and none grows as it is read."""

from __future__ import annotations

from typing import Any

import yaml

MOST_ALIASED = 1 << 20  # characters and values that the aliases of a text may stand for


class AliasError(yaml.YAMLError):
    """The aliases of a text stand for more than it may hold."""

    def __str__(self) -> str:
        return f"its aliases stand for more than {MOST_ALIASED} characters and values"


class BoundLoader(yaml.SafeLoader):
    """Refuses a text whose aliases would make far more of it: some lines may be gigabytes.

    What aliases name is held once, and copied by whoever checks or writes the values.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Raises AliasError."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            sizes: dict[yaml.Node, int] = {}
            if _whole_size(node, sizes) - sum(map(_own_size, sizes)) > MOST_ALIASED:
                raise AliasError
        return node


def load_yaml(text: str | bytes) -> Any:
    """Plain values of a text. Raises yaml.YAMLError, ValueError for a day that is none, and
    RecursionError."""
    return yaml.load(text, BoundLoader)


def _whole_size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Characters and values below a node, with those that aliases stand for."""
    if node not in sizes:
        sizes[node] = 0  # until it is known: of what holds itself
        sizes[node] = _own_size(node) + sum(_whole_size(each, sizes) for each in _below(node))
    return sizes[node]


def _own_size(node: yaml.Node) -> int:
    return 1 + len(node.value) if isinstance(node, yaml.ScalarNode) else 1


def _below(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
