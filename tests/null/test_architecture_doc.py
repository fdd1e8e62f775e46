"""docs/architecture.md against the tree: each file it names exists, and each room and loose module is on its map."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "src" / "crucible"
DOC = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")

NAMED = set(re.findall(r"`([\w./-]+(?:/|\.(?:py|md|toml)))`", DOC))
"""What stands in code quotes and looks like a file or, with a slash at its end, a folder."""


def test_every_file_named_exists() -> None:
    assert len(NAMED) > 40
    missing = [name for name in sorted(NAMED) if not ((PACKAGE / name).exists() or (REPO / name).exists())]
    assert missing == []


def test_both_paths_are_numbered_without_a_gap() -> None:
    paths = re.split(r"^## ", DOC, flags=re.MULTILINE)[1:3]
    assert [path.splitlines()[0] for path in paths] == ["From text to an artifact", "From a prompt to text"]
    for path in paths:
        numbers = [int(number) for number in re.findall(r"^(\d+)\. ", path, flags=re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > 10


def test_every_room_and_loose_module_is_on_the_map() -> None:
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    on_map = set(re.findall(r"^\| `([\w./]+)`", DOC, flags=re.MULTILINE))
    assert on_map == rooms | modules
