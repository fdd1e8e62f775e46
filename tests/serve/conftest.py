"""Servers for the tests of the service: the real command on a toy model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES
from serve_process import Server, serving
from toy_artifact import write_toy_artifact


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a chat template and a context of 256 tokens."""
    family = FAMILIES["chatml"]
    folder = tmp_path_factory.mktemp("serve") / "toy"
    return write_toy_artifact(folder, chat_template=family.source, control=family.control, max_position_embeddings=256)


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose context is so long that filling it takes many seconds."""
    return write_toy_artifact(tmp_path_factory.mktemp("serve") / "long", max_position_embeddings=16384)


@pytest.fixture(scope="session")
def server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that many tests share."""
    log = tmp_path_factory.mktemp("log") / "server.txt"
    with serving(toy_model, log, "--backend", "reference", "--alias", "gpt-4o") as server:
        yield server


@pytest.fixture
def make_server(toy_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers of a test's own; options as on the command line."""
    with ExitStack() as stack:

        def make(
            *options: str,
            model: Path | str = toy_model,
            backend: str = "reference",
            wait: bool = True,
            **environment: Any,
        ) -> Server:
            log = tmp_path / f"server-{len(list(tmp_path.glob('server-*')))}.txt"
            arguments = ["--backend", backend, *options]
            return stack.enter_context(serving(model, log, *arguments, wait=wait, **environment))

        yield make


@pytest.fixture(scope="session")
def null_server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose engine computes nothing."""
    with serving(toy_model, tmp_path_factory.mktemp("log") / "null.txt", "--backend", "null") as server:
        yield server
