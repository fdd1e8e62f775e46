"""This machine: what it has, and what models do on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crucible.commands import examples
from crucible.errors import CrucibleError

if TYPE_CHECKING:
    from crucible.bench.harness import BenchReport

app = typer.Typer()
bench = typer.Typer(no_args_is_help=True, help="Measure speed, with the machine's ceiling beside each number.")
PANEL = "This machine"

Backend = Annotated[Literal["auto", "cpu", "reference"], typer.Option(help="Engine backend.")]
Weights = Annotated[Literal["f32", "f16", "int8"], typer.Option(help="What matrices are held in.")]
Model = Annotated[str, typer.Argument(help="A model, as for `crucible generate`.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens drawn by each request.")]
Rounds = Annotated[int, typer.Option(help="Rounds that count, after one that does not.")]


@app.command(rich_help_panel=PANEL, epilog=examples("crucible doctor"))
def doctor() -> None:
    """Check what this machine has and lacks, with a remedy for each lack."""
    from crucible.doctor import exit_code, render, run_checks

    checks = run_checks()
    render(checks)
    raise typer.Exit(exit_code(checks))


@bench.command(epilog=examples("crucible bench decode smollm2 --batch 1 --batch 16"))
def decode(
    model: Model,
    backend: Backend = "auto",
    weights: Weights = "int8",
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests at once; may be repeated.", show_default="1")
    ] = None,
    prompt_tokens: PromptTokens = 512,
    new_tokens: NewTokens = 128,
    rounds: Rounds = 5,
) -> None:
    """Tokens per second of greedy decoding, beside what the memory's bandwidth allows."""
    from crucible.bench.generation import bench_decode

    _show(
        lambda on_round: bench_decode(
            model,
            backend=backend,
            weight_format=weights,
            batches=batch or [1],
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            on_round=on_round,
        )
    )


@bench.command(epilog=examples("crucible bench prefill smollm2 --prompt-tokens 512"))
def prefill(
    model: Model,
    backend: Backend = "auto",
    weights: Weights = "int8",
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts as COUNTxTOKENS; may be repeated.", show_default="1x512")
    ] = None,
    rounds: Rounds = 5,
) -> None:
    """Prompt tokens per second, beside what the arithmetic units allow."""
    from crucible.bench.generation import bench_prefill

    _show(
        lambda on_round: bench_prefill(
            model,
            backend=backend,
            weight_format=weights,
            shapes=[_shape(text) for text in prompt or ["1x512"]],
            rounds=rounds,
            on_round=on_round,
        )
    )


@bench.command(epilog=examples("crucible bench compare --engines crucible,llama-cpp"))
def compare(
    model: Annotated[str, typer.Argument(help="A .gguf file, or `smollm2`.")] = "smollm2",
    engines: Annotated[str, typer.Option(help="Engines, separated by commas.")] = "crucible,llama-cpp",
    backend: Backend = "auto",
    prompt_tokens: PromptTokens = 512,
    new_tokens: NewTokens = 128,
    rounds: Rounds = 5,
    threads: Annotated[int | None, typer.Option(help="Of each engine.", show_default="all usable cores")] = None,
) -> None:
    """Prefill, decode and time to the first token of several engines, interleaved, on the same weights."""
    from crucible.bench.compare import bench_compare

    _show(
        lambda on_round: bench_compare(
            model,
            engines=engines.split(","),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            threads=threads,
            backend=backend,
            on_round=on_round,
        )
    )


def _shape(text: str) -> tuple[int, int]:
    count, times, tokens = text.partition("x")
    if not (times and count.isdigit() and tokens.isdigit()):
        raise CrucibleError(f"--prompt is COUNTxTOKENS, such as 4x1024, not {text!r}")
    return int(count), int(tokens)


def _show(measure: Callable[[Callable[[int, int], None]], BenchReport]) -> None:
    """Rounds on standard error as they pass, then the table; the last line of standard output is one JSON object."""
    from rich.console import Console

    with Console(stderr=True).status("first round, which does not count") as status:
        report = measure(lambda done, rounds: status.update(f"round {done} of {rounds}"))
    Console().print(report.render())
    print(report.to_json())


app.add_typer(bench, name="bench", rich_help_panel=PANEL)
