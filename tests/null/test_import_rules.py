"""The import rules of docs/architecture.md, checked over the import graph that the sources state.

Every import statement counts, wherever it stands: at the top, inside a function, under TYPE_CHECKING. Two tests at
the end run the interpreter, because what `import crucible` really loads is the only proof of what it loads.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "crucible"

HEAVY = (
    "torch",
    "numba",
    "cuda",
    "matplotlib",
    "textual",
    "datasets",
    "pyarrow",
    "pandas",
    "transformers",
    "pynvml",
    "gguf",
    "fastapi",
    "starlette",
    "uvicorn",
    "zmq",
    "msgspec",
    "prometheus_client",
)
"""Heavy or optional: loaded only by the function that needs them."""

WITHOUT_TORCH = (
    "cli",
    "commands",
    "completion",
    "config",
    "data",
    "doctor",
    "engine",
    "errors",
    "evaluate",
    "files",
    "gguf",
    "hardware",
    "llm",
    "models",
    "tokenizer",
)
"""What works, module by module, where nothing heavy is installed."""

ROOT_VERSION = "crucible.__version__"

Graph = dict[str, set[str]]
"""Module -> every module it names in an import; "crucible.x" for our own, the whole dotted name for others."""


# ---- the graph --------------------------------------------------------------------------------------------------


def import_graph(source: Path) -> Graph:
    """The graph of a source tree whose folder stands for the package `crucible`."""
    files = {module_name(source, path): path for path in source.rglob("*.py")}
    return {module: set(imports(module, path, files)) for module, path in files.items()}


def module_name(source: Path, path: Path) -> str:
    parts = ("crucible", *path.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from crucible.engine import sampling` names the module, `... import SamplingParams` the package.
                named = f"{base}.{alias.name}"
                yield named if named in known or base == "crucible" else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield node.args[0].value if isinstance(node.args[0], ast.Constant) else "a name made at run time"


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def reachable(graph: Graph, module: str) -> set[str]:
    """Everything that a module names, or that our modules it names do, and so on.

    Loading a module loads the packages above it too, so they count as named: all but the root, which loads nothing
    before an attribute of it is asked for (proved below).
    """
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            parts = name.split(".")
            new = {".".join(parts[: i + 1]) for i in range(len(parts))} - seen - {"crucible"}
            seen |= new
            waiting += new
    return seen


# ---- the rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Modules in `who`, and for `reaching` rules all they reach, name nothing that `forbidden` says yes to."""

    sentence: str
    who: Callable[[str], bool]
    forbidden: Callable[[str], bool]
    reaching: bool = False


def ours(*parts: str) -> tuple[str, ...]:
    return tuple(f"crucible.{part}" for part in parts)


RULES = [
    Rule(
        "config imports the standard library alone",
        lambda module: module == "crucible.config",
        lambda name: name.split(".")[0] not in sys.stdlib_module_names,
    ),
    Rule(
        "engine imports neither torch, nor serve, nor tokenizer, and nothing that does",
        lambda module: within(module, "crucible.engine"),
        lambda name: within(name, "torch", "transformers", *ours("serve", "tokenizer")),
        reaching=True,
    ),
    Rule(
        "engine speaks no HTTP",
        lambda module: within(module, "crucible.engine"),
        lambda name: within(name, "http", "urllib", "requests", "httpx", "fastapi", "starlette", "uvicorn", "zmq"),
    ),
    Rule(
        "engine and model know nothing of each other: they define the computation twice",
        lambda module: within(module, *ours("engine", "model")),
        lambda name: within(name, *ours("engine", "model")),
    ),
    Rule(
        "serve imports engine only in worker.py",
        lambda module: within(module, "crucible.serve") and not within(module, "crucible.serve.worker"),
        lambda name: within(name, "crucible.engine"),
    ),
    Rule(
        "serve.openai and serve.anthropic import serve.protocol, serve.wire and not each other",
        lambda module: within(module, *ours("serve.openai", "serve.anthropic")),
        lambda name: within(name, "crucible") and not within(name, *ours("serve.protocol", "serve.wire")),
    ),
    Rule(
        "serve speaks HTTP only where requests come in",
        lambda module: (
            within(module, "crucible.serve")
            and not within(module, *ours("serve.app", "serve.exchange", "serve.reading", "serve.security"))
            and not within(module, *ours("serve.server", "serve.web"))
        ),
        lambda name: within(name, "http", "fastapi", "starlette", "uvicorn"),
    ),
    Rule(
        "serve speaks to the engine's process only in channel, process, supervisor and worker",
        lambda module: (
            within(module, "crucible.serve")
            and not within(module, *ours("serve.channel", "serve.process", "serve.supervisor", "serve.worker"))
        ),
        lambda name: within(name, "zmq", "multiprocessing", "subprocess", "pickle"),
    ),
    Rule(
        "train, ablate and export never import serve, nor anything that does",
        lambda module: within(module, *ours("train", "ablate", "export")),
        lambda name: within(name, "crucible.serve"),
        reaching=True,
    ),
    Rule(
        "client imports only serve.protocol",
        lambda module: within(module, "crucible.client"),
        lambda name: within(name, "crucible") and not within(name, "crucible.serve.protocol"),
    ),
    Rule(
        "the library API at the root is for users: inside, its parts are imported from where they are",
        lambda module: module != "crucible",
        lambda name: within(name, *ours("LLM", "SamplingParams")),
    ),
    Rule(
        "nothing imports the command line",
        lambda module: not within(module, *ours("cli", "__main__")),
        lambda name: within(name, "crucible.cli"),
    ),
]


def violations(graph: Graph) -> list[str]:
    """Each breach of a rule in words: who, whom, which rule."""
    found = []
    for rule in RULES:
        for module in sorted(filter(rule.who, graph)):
            home = ".".join(module.split(".")[: 3 if within(module, "crucible.serve") else 2])
            names = reachable(graph, module) if rule.reaching else graph[module]
            for name in sorted(names):
                # A package may always name its own modules, and every module the root and its version.
                if rule.forbidden(name) and not within(name, home) and name not in ("crucible", ROOT_VERSION):
                    found.append(f"{module} -> {name}: {rule.sentence}")
    return found


def test_the_sources_keep_every_rule() -> None:
    graph = import_graph(SOURCE)
    assert {"crucible", "crucible.config", "crucible.engine"} <= graph.keys()
    assert violations(graph) == []


@pytest.mark.parametrize(
    ("module", "line", "breach"),
    [
        ("config", "import numpy", "crucible.config -> numpy"),
        ("config", "from crucible.hardware import cpu", "crucible.config -> crucible.hardware"),
        ("engine/runner", "def f():\n    import torch.cuda", "crucible.engine.runner -> torch.cuda"),
        ("engine/runner", "from ..tokenizer import Tokenizer", "crucible.engine.runner -> crucible.tokenizer"),
        ("engine/runner", "from .. import serve", "crucible.engine.runner -> crucible.serve"),
        ("engine/runner", "from crucible.helper import f", "crucible.engine.runner -> torch"),
        ("engine/runner", "from crucible.model.norms import f", "crucible.engine.runner -> torch"),
        ("engine/runner", "import urllib.request", "crucible.engine.runner -> urllib.request"),
        ("engine/cuda/driver", "from ...model.norms import x", "crucible.engine.cuda.driver -> crucible.model.norms"),
        ("model/norms", "from crucible import engine", "crucible.model.norms -> crucible.engine"),
        ("serve/app", "from crucible.engine.request import R", "crucible.serve.app -> crucible.engine.request"),
        (
            "serve/openai/chat",
            "from ..anthropic import events",
            "crucible.serve.openai.chat -> crucible.serve.anthropic",
        ),
        ("serve/openai/chat", "from ..channel import send", "crucible.serve.openai.chat -> crucible.serve.channel"),
        ("serve/openai/chat", "from starlette.requests import R", "crucible.serve.openai.chat -> starlette.requests"),
        ("serve/channel", "import fastapi", "crucible.serve.channel -> fastapi"),
        ("serve/app", "import zmq.asyncio", "crucible.serve.app -> zmq.asyncio"),
        ("train/loop", "import crucible.serve.app", "crucible.train.loop -> crucible.serve.app"),
        (
            "export/names",
            "import importlib\nimportlib.import_module('crucible.serve')",
            "crucible.export.names -> cruc",
        ),
        ("client/library", "from crucible.config import ModelConfig", "crucible.client.library -> crucible.config"),
        ("data/shards", "from crucible.cli import main", "crucible.data.shards -> crucible.cli"),
        ("llm", "from crucible import SamplingParams", "crucible.llm -> crucible.SamplingParams"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, module: str, line: str, breach: str) -> None:
    plant(tmp_path, {module: line})
    found = violations(import_graph(tmp_path))
    assert any(violation.startswith(breach) for violation in found), found


def test_what_the_rules_allow_is_not_found(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "config": "import math",
            "engine/runner": "import numpy\nfrom crucible.config import ModelConfig\nfrom .pages import Pages",
            "serve/worker": "from crucible.engine import runner",
            "serve/app": "import fastapi\nfrom starlette.requests import Request",
            "serve/process": "import subprocess, zmq",
            "serve/openai/chat": "from ..protocol import Event\nfrom . import stream\nfrom crucible import __version__",
            "train/loop": "import torch\nfrom crucible.model.norms import RMSNorm",
            "client/library": "from crucible.serve.protocol import Event",
            "cli": "def serve():\n    from crucible.serve import app\n    from crucible.engine import runner",
        },
    )
    assert violations(import_graph(tmp_path)) == []


def plant(root: Path, modules: dict[str, str]) -> None:
    """A small package in which every folder of the house exists, with some modules' text given."""
    empty = ["__init__", "engine/__init__", "tokenizer/__init__", "model/norms", "serve/__init__"]
    empty += ["serve/protocol", "serve/channel", "serve/openai/__init__", "serve/anthropic/__init__"]
    for name, text in {
        **dict.fromkeys(empty, ""),
        "helper": "import torch",
        "model/__init__": "import torch",
        **modules,
    }.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


# ---- what really gets loaded ------------------------------------------------------------------------------------

BLOCK = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is made absent by the test", name=name)

sys.meta_path.insert(0, Absent())
"""


def python(code: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_the_root_loads_nothing_but_itself() -> None:
    loaded = python("import sys, crucible; crucible.__version__; print(*sys.modules)")
    assert [name for name in loaded if within(name, "crucible")] == ["crucible"]


@pytest.mark.parametrize("module", ["crucible", "crucible.cli"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    loaded = python(f"import sys, {module}; print(*sys.modules)")
    assert [name for name in loaded if within(name, *HEAVY)] == []


def test_the_torch_free_parts_work_where_nothing_heavy_is_installed() -> None:
    modules = sorted(
        name
        for name in import_graph(SOURCE)
        if within(name, *ours(*WITHOUT_TORCH)) and not within(name, "crucible.engine.cpu")  # that room is Numba's
    )
    assert len(modules) > len(WITHOUT_TORCH)
    python(BLOCK + "".join(f"import {name}\n" for name in modules))
