"""Serving a model over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from crucible.commands import examples
from crucible.errors import CrucibleError

app = typer.Typer()
PANEL = "Use a model"
_LIMITS = "Limits"
_ACCESS = "Access"
_TEXT = "What clients are told"


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible serve artifacts/demo",
        "crucible serve smollm2 --port 8000 --model-id smollm2 --alias gpt-4o-mini",
        "CRUCIBLE_API_KEY=secret crucible serve smollm2 --host 0.0.0.0",
    ),
)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="An artifact or Hugging Face folder, a .gguf file, a hub id OWNER/NAME, or `smollm2`.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any free one.", min=0, max=65535)] = 8080,
    backend: Annotated[
        Literal["auto", "cuda", "cpu", "reference", "null"],
        typer.Option(help="Engine backend; auto is the fastest here. null computes nothing: it measures the rest."),
    ] = "auto",
    weights: Annotated[
        Literal["auto", "f32", "f16", "int8"], typer.Option(help="What matrices are held in; auto suits the backend.")
    ] = "auto",
    max_batch: Annotated[int, typer.Option(help="Requests computed at once.", min=1, rich_help_panel=_LIMITS)] = 64,
    max_queue: Annotated[
        int, typer.Option(help="Requests that wait beside them; more get 429 at once.", min=0, rich_help_panel=_LIMITS)
    ] = 256,
    kv_pages: Annotated[
        int | None,
        typer.Option(
            help="Pages of 16 tokens of the key/value cache.",
            min=1,
            show_default="as the batch may need, as far as memory goes",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefill_budget: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens per step over all requests.",
            min=1,
            show_default="128 on the backend cpu, else 512",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="Prompt tokens per step of one request.", min=1, show_default="256", rich_help_panel=_LIMITS),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Size of a request's body.", min=1024, rich_help_panel=_LIMITS)
    ] = 4 << 20,
    drain_seconds: Annotated[
        float,
        typer.Option(help="Time that requests have to end after Ctrl-C or SIGTERM.", min=0, rich_help_panel=_LIMITS),
    ] = 30.0,
    startup_deadline: Annotated[
        float, typer.Option(help="Seconds in which the engine must be ready.", min=1, rich_help_panel=_LIMITS)
    ] = 600.0,
    engine_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life after which the engine is replaced.", min=1, rich_help_panel=_LIMITS
        ),
    ] = 30.0,
    model_id: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="its name", rich_help_panel=_TEXT),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name that it answers to; may be repeated.", show_default="none", rich_help_panel=_TEXT
        ),
    ] = None,
    default_seed: Annotated[
        str, typer.Option(help="Of requests without one: a number, or `random`.", rich_help_panel=_TEXT)
    ] = "1234",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="CRUCIBLE_API_KEY",
            help="Key that requests must carry.",
            show_default="none",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Serve others without a key.", rich_help_panel=_ACCESS),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name in Host beside addresses and localhost; may be repeated.",
            show_default="none",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin that may call; may be repeated.", show_default="none", rich_help_panel=_ACCESS),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web/--no-web", help="The web page at /: a chat, and the service as plots.")
    ] = True,
) -> None:
    """Serve a model over HTTP: a native API, OpenAI's and Anthropic's. Ctrl-C lets requests end first."""
    from crucible.serve.app import AppSettings
    from crucible.serve.channel import EngineConfig
    from crucible.serve.server import ServerSettings

    settings = ServerSettings(
        engine=EngineConfig(
            model=model,
            backend=backend,
            weights=weights,
            max_batch=max_batch,
            kv_pages=kv_pages,
            prefill_budget=prefill_budget,
            prefill_chunk=prefill_chunk,
        ),
        app=AppSettings(
            api_key=api_key or None,
            allowed_hosts=tuple(name.lower() for name in allow_host or ()),
            cors_origins=tuple(cors_origin or ()),
            max_body_bytes=max_body_bytes,
            web=web,
        ),
        model_id=model_id,
        aliases=tuple(alias or ()),
        host=host,
        port=port,
        max_queue=max_queue,
        default_seed=_seed(default_seed),
        drain_seconds=drain_seconds,
        startup_deadline=startup_deadline,
        engine_timeout=engine_timeout,
        allow_unauthenticated=allow_unauthenticated,
    )
    raise typer.Exit(_run(settings))


def _seed(text: str) -> int | None:
    if text == "random":
        return None
    try:
        return int(text)
    except ValueError:
        raise CrucibleError(f"--default-seed must be an integer or `random`, not {text!r}") from None


def _run(settings: object) -> int:
    from rich.console import Console

    from crucible.serve.server import ServerSettings, run
    from crucible.serve.service import Service

    assert isinstance(settings, ServerSettings)
    console = Console(stderr=True)
    status = console.status("starting")

    def progress(stage: str, done: float | None) -> None:
        status.update(stage if done is None else f"{stage} {done:.0%}")
        if not console.is_terminal:
            console.print(stage, markup=False, highlight=False)

    def ready(service: Service, url: str) -> None:
        status.stop()
        engine, served = service.supervisor.ready, service.served
        assert engine is not None
        lines = [
            f"{served.model_id} on {engine.device} ({engine.backend}, {engine.weights}), "
            f"ready in {engine.seconds:.1f} s",
            f"{url}/v1 for OpenAI's clients, {url} for Anthropic's{' and browsers' if settings.app.web else ''}; try",
            f"  curl {url}/v1/generate -H 'content-type: application/json' "
            '-d \'{"prompt": "Once upon a time", "max_tokens": 32}\'',
        ]
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with status:
        return run(settings, on_progress=progress, on_ready=ready)
