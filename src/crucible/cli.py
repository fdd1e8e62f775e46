"""The command line: one entry point, `crucible`. The commands are in `commands/`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import crucible
from crucible.commands import chat, machine, make, serve, use
from crucible.config import ConfigError
from crucible.errors import CrucibleError, install

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def main() -> None:
    """Runs the command line. Bad input is one line on standard error and exit status 1; Ctrl-C is 130."""
    try:
        app()
    except BrokenPipeError:  # `crucible ... | head`
        sys.stderr.close()
        sys.exit(1)
    except (CrucibleError, ConfigError, OSError) as error:
        print(f"crucible: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"crucible: {error.name} is not installed; {install(extra)}", file=sys.stderr)
        sys.exit(1)


_EXTRAS = {"torch": "train", "datasets": "data", "pyarrow": "data", "zstandard": "data", "numba": "cpu", "gguf": "gguf"}
_EXTRAS |= dict.fromkeys(
    ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "zmq", "msgspec", "prometheus_client"), "serve"
)
_EXTRAS |= dict.fromkeys(("textual", "markdown_it", "platformdirs"), "tui")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"crucible {crucible.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train a small language model from scratch and run it.

    The path: [bold]prepare[/] text into token shards, [bold]train[/] on them, [bold]export[/] the checkpoint as an
    artifact, [bold]generate[/] from it. [bold]crucible demo[/] walks it once with the text that ships.
    """


for _part in (make, use, serve, chat, machine):
    app.add_typer(_part.app)

if __name__ == "__main__":
    main()
