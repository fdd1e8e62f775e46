"""Count code lines per package under src/crucible and hold them to their budget: `python scripts/lines.py`.

A code line carries a token that is neither comment nor docstring. The budget is the table [tool.crucible.lines] of
pyproject.toml; the key "crucible" stands for the modules that lie in no package. Fails when a package crosses its
budget or has none, when a source file is over 500 lines of any kind, and when any file is over 3 MB: smallness is
defended by number, and deleting is as good a way to stay inside as raising a number with a reason.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FILE_BYTES = 3_000_000
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".js", ".css"}
BLANK_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines of a Python file that hold code."""
    with tokenize.open(path) as file:
        text = file.read()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type not in BLANK_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A bare string documents what stands before it: a docstring, wherever it stands.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count(package_root: Path) -> Counter[str]:
    """Code lines of each package directly under `package_root`; its own modules count under its name."""
    lines: Counter[str] = Counter()
    for path in sorted(package_root.rglob("*.py")):
        parts = path.relative_to(package_root).parts
        lines[parts[0] if len(parts) > 1 else package_root.name] += code_lines(path)
    return lines


def complaints(repo: Path, lines: Counter[str], budget: dict[str, int]) -> Iterator[str]:
    """What crosses a limit, one sentence each."""
    for package, number in lines.items():
        if package not in budget:
            yield f"{package} has no budget: add it to [tool.crucible.lines] in pyproject.toml"
        elif number > budget[package]:
            yield f"{package} has {number} code lines, {number - budget[package]} over its budget"
    for package in budget.keys() - lines.keys():
        yield f"{package} has a budget and no code"
    for path in sorted(path for folder in ("src", "tests", "scripts", "docs") for path in (repo / folder).rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            yield f"{path.relative_to(repo)} is over {MAX_FILE_BYTES // 1_000_000} MB"
        if path.suffix in SOURCE_SUFFIXES:
            number = len(path.read_bytes().splitlines())
            if number > MAX_FILE_LINES:
                yield f"{path.relative_to(repo)} has {number} lines, over {MAX_FILE_LINES}: split it by idea"


def main(repo: Path) -> int:
    with (repo / "pyproject.toml").open("rb") as file:
        budget: dict[str, int] = tomllib.load(file)["tool"]["crucible"]["lines"]
    lines = count(repo / "src" / "crucible")
    for package in sorted(lines, key=lambda name: (name != "crucible", name)):
        print(f"{package:<12}{lines[package]:>6} of {budget.get(package, 0)}")
    print(f"{'total':<12}{lines.total():>6} of {sum(budget.values())}")
    found = list(complaints(repo, lines, budget))
    for complaint in found:
        print(complaint, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
