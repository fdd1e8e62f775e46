"""Compiled code on disk: found again by the next process, and never older than any file it came from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from crucible.engine.cpu import compiling

HELPER = """
from {package}.compiling import jit

@jit
def helper(x):
    return x + {added}
"""

MAIN = """
import numba
from {package}.compiling import compile_once, entry
from {package}.helper import helper

@entry
def main(x):
    return helper(x) * 2

compile_once(main, (numba.int64,), "toy", print)
print(main(10), sum(main.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a helper in one file that is compiled into a function of another."""
    folder = tmp_path / "toy_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(compiling.__file__, folder)
    (folder / "helper.py").write_text(HELPER.format(package=folder.name, added=1))
    (folder / "main.py").write_text(MAIN.format(package=folder.name))
    return folder


def run(package: Path, cache: Path) -> list[str]:
    """What main prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", f"{package.name}.main"],
        cwd=package.parent,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_code_is_compiled_once_and_anew_when_any_file_changes(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    said, result = run(package, cache)
    assert re.search("compiling for toy", said)
    assert result == "22 0"
    assert run(package, cache) == ["22 1"]
    (package / "helper.py").write_text(HELPER.format(package=package.name, added=2))
    assert run(package, cache)[1:] == ["24 0"]
    assert run(package, cache) == ["24 1"]


def test_a_cache_that_cannot_be_written_is_done_without(package: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert run(package, blocked)[1:] == ["22 0"]


def test_the_folder_depends_on_every_source_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiling.cache_folder()
    assert folder == compiling.cache_folder()
    monkeypatch.setattr(compiling, "_CPU", "another")
    assert compiling.cache_folder() != folder
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert compiling.cache_folder().parent == Path("/elsewhere/crucible/cpu")
