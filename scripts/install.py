"""Make .venv and install Crucible into it, editable, with the extras named: `python scripts/install.py dev`.

The Makefile calls this; it needs nothing but Python 3.11 with its venv module. Two environment variables steer it:

    CONSTRAINTS   a pip constraints file (CI passes constraints.txt); empty: the ranges of pyproject.toml
    TORCH_INDEX   where torch comes from: a package index, or "none" for plain pip; unset: decided here

PyPI's torch for Linux is the CUDA build, gigabytes that a machine without an NVIDIA card has no use for. There torch is
taken from PyTorch's own index of CPU builds; where that cannot be reached, from PyPI after all, in the version that CI
tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

MINIMUM = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REPO = Path(__file__).resolve().parent.parent
VENV_PYTHON = REPO / ".venv" / "bin" / "python"
PIP = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check"]


def main(extras: list[str]) -> None:
    if sys.version_info < MINIMUM:
        sys.exit(f"Crucible needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer, not {sys.version.split()[0]}")
    make_venv()
    constraints = os.environ.get("CONSTRAINTS", "")
    pins = ["--constraint", str(REPO / constraints)] if constraints else []
    requirement = torch_requirement(extras)
    if requirement and not has_torch():
        source = torch_source()
        say(f"torch: {source[1]}")
        run([*PIP, "install", *pins, *source[0], requirement])
    say(f"crucible[{','.join(extras)}]")
    run([*PIP, "install", *pins, "--editable", f"{REPO}[{','.join(extras)}]"])


def make_venv() -> None:
    """Create .venv unless a whole one is there: an interrupted creation leaves one without pip."""
    if VENV_PYTHON.exists() and subprocess.run([*PIP, "--version"], capture_output=True).returncode == 0:
        return
    say(f".venv with {sys.executable}")
    run([sys.executable, "-m", "venv", "--clear", str(REPO / ".venv")])


def torch_requirement(extras: list[str]) -> str | None:
    """The torch range of pyproject.toml, if these extras or the extras they name ask for torch."""
    import tomllib

    with (REPO / "pyproject.toml").open("rb") as file:
        table: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in table:
            sys.exit(f"no extra {extra!r} in pyproject.toml; there are {', '.join(table)}")
        for requirement in table[extra]:
            if re.match(r"torch\b", requirement):
                return requirement
            nested = re.match(r"crucible\[(.+)\]", requirement)
            waiting += nested.group(1).split(",") if nested else []
    return None


def has_torch() -> bool:
    code = "import importlib.metadata as m; m.version('torch')"
    return subprocess.run([str(VENV_PYTHON), "-c", code], capture_output=True).returncode == 0


def torch_source() -> tuple[list[str], str]:
    """pip's arguments for the place torch is taken from, and that choice in words."""
    sys.path.insert(0, str(REPO / "src"))
    from crucible.hardware import nvidia_gpu_present

    index = os.environ.get("TORCH_INDEX", "")
    if index == "none":
        return [], "plain pip"
    if index:
        return ["--index-url", index], f"from {index}"
    if os.environ.get("PIP_NO_INDEX"):
        return [], "from the wheels at hand, no index"
    if sys.platform != "linux":
        return [], "PyPI's build for this system"
    if nvidia_gpu_present():
        return [], "NVIDIA card found, PyPI's CUDA build"
    if reachable(CPU_INDEX):
        return ["--index-url", CPU_INDEX], f"no NVIDIA card, CPU build from {CPU_INDEX}"
    tested = re.search(r"^torch==\S+", (REPO / "constraints.txt").read_text(), re.MULTILINE)
    assert tested, "constraints.txt pins no torch"
    return [tested.group()], f"no NVIDIA card, but {CPU_INDEX} cannot be reached: {tested.group()} from PyPI"


def reachable(index: str) -> bool:
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=5):
            return True
    except OSError:
        return False


def say(text: str) -> None:
    print(f"--- install {text}", flush=True)


def run(command: list[str]) -> None:
    result = subprocess.run(command)
    if result.returncode:
        sys.exit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    main(sys.argv[1:])
