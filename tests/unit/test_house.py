"""The tool that measures the grain of the code counts what it says it counts."""

from __future__ import annotations

from pathlib import Path

from tools import house

MODULES = house.load_modules()


def modules_of(tmp_path: Path, **sources: str) -> dict[str, house.Module]:
    modules = {}
    for name, source in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        modules[name] = house.Module(name, path)
    return modules


def test_no_two_classes_share_a_name() -> None:
    assert house.names_twice(MODULES) == {}


def test_every_entry_of_the_three_ways_is_there_and_touches_its_neighbour() -> None:
    for way in house.read_ways(house.PAGE.read_text()).values():
        assert house.broken_entries(way, MODULES) == []


def test_what_carries_any_of_the_three_is_there() -> None:
    page = house.PAGE.read_text()
    assert len(house.read_carriers(page)) >= 9
    assert house.missing_carriers(page, MODULES) == []
    renamed = page.replace("RequestLog.once`", "RequestLog.twice`")
    assert house.missing_carriers(renamed, MODULES) == [
        "sluice/runtime/idempotency.py: RequestLog.twice does not exist"
    ]


def test_two_classes_of_one_name_are_noticed(tmp_path: Path) -> None:
    modules = modules_of(tmp_path, a="class Row:\n    x = 1\n", b="class Row:\n    y = 2\n")
    assert house.names_twice(modules) == {"Row": ["a", "b"]}


def test_an_interface_and_what_implements_it_may_share_a_name(tmp_path: Path) -> None:
    protocol = "class Text(Protocol):\n    length: int\n\n    def read(self) -> str: ...\n"
    whole = (
        "class Text:\n    def __init__(self):\n        self.length = 1\n\n"
        "    def read(self):\n        return ''\n"
    )
    part = "class Text:\n    def read(self):\n        return ''\n"
    assert house.names_twice(modules_of(tmp_path, a=protocol, b=whole)) == {}
    assert house.names_twice(modules_of(tmp_path, a=protocol, b=part)) == {"Text": ["a", "b"]}
