"""scripts/lines.py: what counts as a code line, and that each limit is a failure when crossed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]
SOURCE = '''\
"""A module
docstring."""

# a comment
import os  # with a comment behind


CONSTANT = 1
"""What documents a constant."""


def function(
    x: int,
) -> str:
    """One line."""

    text = """a string that is
code"""
    return text + os.sep * x
'''


@pytest.fixture
def lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lines", REPO / "scripts" / "lines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository whose package has 8 code lines at the top and 2 in `part`, its budget exactly those."""
    package = tmp_path / "src" / "crucible"
    (package / "part" / "deep").mkdir(parents=True)
    (package / "module.py").write_text(SOURCE)
    (package / "part" / "a.py").write_text("x = 1\n")
    (package / "part" / "deep" / "b.py").write_text("# nothing\n\ny = 2\n")
    (tmp_path / "pyproject.toml").write_text("[tool.crucible.lines]\ncrucible = 8\npart = 2\n")
    return tmp_path


def test_blank_lines_comments_and_docstrings_do_not_count(lines: ModuleType, repo: Path) -> None:
    assert lines.code_lines(repo / "src/crucible/module.py") == 8
    assert lines.count(repo / "src/crucible") == {"crucible": 8, "part": 2}
    assert lines.main(repo) == 0


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("src/crucible/part/a.py", "x = 1\nz = 3\n", "part has 3 code lines, 1 over its budget"),
        ("src/crucible/new/a.py", "x = 1\n", "new has no budget"),
        (
            "pyproject.toml",
            "[tool.crucible.lines]\ncrucible = 8\npart = 2\ngone = 1\n",
            "gone has a budget and no code",
        ),
        ("tests/long.py", "# line\n" * 501, "tests/long.py has 501 lines, over 500"),
        ("src/crucible/part/kernel.cu", "\n" * 501, "kernel.cu has 501 lines"),
        ("docs/large.bin", "x" * 3_000_001, "docs/large.bin is over 3 MB"),
    ],
)
def test_each_limit_is_a_failure(
    lines: ModuleType, repo: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, complaint: str
) -> None:
    (repo / file).parent.mkdir(parents=True, exist_ok=True)
    (repo / file).write_text(text)
    assert lines.main(repo) == 1
    (found,) = capsys.readouterr().err.splitlines()
    assert complaint in found
