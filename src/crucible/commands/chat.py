"""Talking with a model in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Literal

import typer

from crucible.commands import examples
from crucible.errors import CrucibleError

app = typer.Typer()
PANEL = "Use a model"


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible chat smollm2", "crucible chat artifacts/demo", "crucible chat --server http://127.0.0.1:8080"
    ),
)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to serve for this conversation, as `crucible serve` takes it.", show_default=False
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="A server that runs already.", show_default="http://127.0.0.1:8080")
    ] = None,
    backend: Annotated[
        Literal["auto", "cuda", "cpu", "reference", "null"], typer.Option(help="Engine backend of MODEL's server.")
    ] = "auto",
    weights: Annotated[
        Literal["auto", "f32", "f16", "int8"], typer.Option(help="What MODEL's matrices are held in.")
    ] = "auto",
    api_key: Annotated[
        str | None, typer.Option(envvar="CRUCIBLE_API_KEY", help="Key that the server asks for.", show_default="none")
    ] = None,
) -> None:
    """Talk with a model in the terminal: one that is served already, or MODEL, served for as long as this runs."""
    if model is not None and server is not None:
        raise CrucibleError("give MODEL, which is then served here, or --server, whose model is its own; not both")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CrucibleError("chat needs a terminal; `crucible generate` prints a reply anywhere")
    # Textual reads it when it is imported: screens a second, at most.
    os.environ.setdefault("TEXTUAL_FPS", "30")
    from platformdirs import user_data_path

    from crucible.client.api import Client
    from crucible.client.store import Store
    from crucible.client.tui.app import ChatApp

    store = Store(user_data_path("crucible", appauthor=False) / "conversations")
    with ExitStack() as stack:
        if model is not None:
            server = stack.enter_context(_serving(model, ["--backend", backend, "--weights", weights], api_key))
        chat_app = ChatApp(Client(server or "http://127.0.0.1:8080", api_key or None), store)
        chat_app.run()
    raise typer.Exit(chat_app.return_code or 0)


@contextmanager
def _serving(model: str, options: list[str], api_key: str | None) -> Iterator[str]:
    """A server of a model, its URL, and a line about its start meanwhile."""
    from rich.console import Console

    from crucible.client.child import serving

    with ExitStack() as stack:
        status = stack.enter_context(Console(stderr=True).status(f"starting {model}"))
        url = stack.enter_context(serving(model, options, api_key=api_key, on_progress=status.update))
        status.stop()
        yield url
