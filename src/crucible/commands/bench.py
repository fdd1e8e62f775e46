"""Benchmarks: what models do on this machine. Each prints a table, and as the last line one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crucible.commands import examples
from crucible.errors import CrucibleError

if TYPE_CHECKING:
    from crucible.bench.harness import BenchReport

app = typer.Typer(no_args_is_help=True, help="Measure speed, with the machine's ceiling beside each number.")

Backend = Annotated[Literal["auto", "cpu", "cuda", "reference"], typer.Option(help="Engine backend.")]
ServedBackend = Annotated[
    Literal["auto", "cpu", "cuda", "reference", "null"],
    typer.Option(help="Engine backend; `null` computes nothing and shows what all the rest costs."),
]
Weights = Annotated[Literal["f32", "f16", "int8"], typer.Option(help="What matrices are held in.")]
ServedWeights = Annotated[Literal["auto", "f32", "f16", "int8"], typer.Option(help="What matrices are held in.")]
Model = Annotated[str, typer.Argument(help="A model, as for `crucible generate`.")]
MaybeModel = Annotated[str | None, typer.Argument(help="A model, as for `crucible generate`.", show_default=False)]
Random = Annotated[
    str | None, typer.Option(help="A preset with random weights in place of a model.", show_default=False)
]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each prompt.")]
LongestPrompt = Annotated[int, typer.Option(help="Tokens of the longest prompt.")]
NewTokens = Annotated[int, typer.Option(help="Tokens drawn by each request.")]
Rounds = Annotated[int, typer.Option(help="Rounds that count, after one that does not.")]
Url = Annotated[
    str | None,
    typer.Option(help="Of a server that runs already, with that model.", show_default="one of the benchmark's own"),
]


@app.command(
    epilog=examples(
        "crucible bench decode smollm2 --batch 1 --batch 16", "crucible bench decode --random 120m --backend cuda"
    )
)
def decode(
    model: MaybeModel = None,
    random: Random = None,
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
            random=random,
            backend=backend,
            weight_format=weights,
            batches=batch or [1],
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            on_round=on_round,
        )
    )


@app.command(
    epilog=examples(
        "crucible bench prefill smollm2 --prompt 1x512", "crucible bench prefill --random 120m --backend cuda"
    )
)
def prefill(
    model: MaybeModel = None,
    random: Random = None,
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
            random=random,
            backend=backend,
            weight_format=weights,
            shapes=[_shape("--prompt", text) for text in prompt or ["1x512"]],
            rounds=rounds,
            on_round=on_round,
        )
    )


@app.command(epilog=examples("crucible bench compare --engines crucible,llama-cpp"))
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


@app.command(
    epilog=examples(
        "crucible bench serve smollm2",
        "crucible bench serve smollm2 --clients 1 --clients 8 --rate 2",
        "crucible bench serve smollm2 --backend null --clients 64 --new-tokens 1000",
    )
)
def serve(
    model: Model,
    backend: ServedBackend = "auto",
    weights: ServedWeights = "auto",
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at work at once; may be repeated.", show_default="1 2 4 8 16 64")
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Poisson arrivals per second; may be repeated.", show_default="2, if no --clients are given"),
    ] = None,
    longest_prompt: LongestPrompt = 256,
    new_tokens: NewTokens = 64,
    rounds: Rounds = 3,
    url: Url = None,
) -> None:
    """A model over HTTP: rates, latencies and mean batch as clients see them, beside the engine alone."""
    from crucible.bench.serve import CLIENTS, RATES, bench_serve

    chosen = bool(clients or rate)
    _show(
        lambda on_round: bench_serve(
            model,
            backend=backend,
            weights=weights,
            clients=clients or [] if chosen else CLIENTS,
            rates=rate or [] if chosen else RATES,
            longest_prompt=longest_prompt,
            new_tokens=new_tokens,
            rounds=rounds,
            url=url,
            on_round=on_round,
        )
    )


@app.command(epilog=examples("crucible bench compat smollm2"))
def compat(
    model: Model,
    backend: ServedBackend = "auto",
    weights: ServedWeights = "auto",
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at work at once; may be repeated.", show_default="1 8")
    ] = None,
    longest_prompt: LongestPrompt = 256,
    new_tokens: NewTokens = 128,
    rounds: Rounds = 5,
    url: Url = None,
) -> None:
    """The same requests through the native, OpenAI's and Anthropic's surfaces, interleaved."""
    from crucible.bench.compat import bench_compat

    _show(
        lambda on_round: bench_compat(
            model,
            backend=backend,
            weights=weights,
            clients=clients or [1, 8],
            longest_prompt=longest_prompt,
            new_tokens=new_tokens,
            rounds=rounds,
            url=url,
            on_round=on_round,
        )
    )


@app.command(
    epilog=examples("crucible bench stall smollm2", "crucible bench stall smollm2 --budget 512 --chunk 128 --rounds 1")
)
def stall(
    model: Model,
    backend: ServedBackend = "auto",
    weights: ServedWeights = "auto",
    budget: Annotated[
        list[int] | None,
        typer.Option(help="Value of --prefill-budget; may be repeated.", show_default="64 128 256 512 1024"),
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(help="Value of --prefill-chunk; may be repeated.", show_default="32 64 128 256, and none"),
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(help="Streams under way; may be repeated.", show_default="1 4")
    ] = None,
    arrival: Annotated[
        list[str] | None,
        typer.Option(help="Prompts as COUNTxTOKENS; may be repeated.", show_default="1x33 1x535 1x941 4x535"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds, each with a server for each setting.")] = 3,
) -> None:
    """How long streams stand still while prompts arrive, and how long these wait, by prefill budget and chunk."""
    from crucible.bench.stall import ARRIVALS, BUDGETS, CHUNKS, STREAMS, bench_stall

    _show(
        lambda on_round: bench_stall(
            model,
            backend=backend,
            weights=weights,
            budgets=budget or BUDGETS,
            chunks=chunk or CHUNKS,
            streams=streams or STREAMS,
            arrivals=[_shape("--arrival", text) for text in arrival] if arrival else ARRIVALS,
            rounds=rounds,
            on_round=on_round,
        )
    )


@app.command(epilog=examples("crucible bench soak smollm2 --seconds 60"))
def soak(
    model: Model,
    backend: ServedBackend = "auto",
    weights: ServedWeights = "auto",
    seconds: Annotated[float, typer.Option(help="Of the mixed load; two others take a quarter each.")] = 60,
) -> None:
    """Whether a server stays whole: every surface, clients that leave, few pages, far too many clients."""
    from crucible.bench.soak import bench_soak

    _show(lambda on_round: bench_soak(model, backend=backend, weights=weights, seconds=seconds, on_round=on_round))


def _shape(option: str, text: str) -> tuple[int, int]:
    count, times, tokens = text.partition("x")
    if not (times and count.isdigit() and tokens.isdigit()):
        raise CrucibleError(f"{option} is COUNTxTOKENS, such as 4x1024, not {text!r}")
    return int(count), int(tokens)


def _show(measure: Callable[[Callable[[int, int], None]], BenchReport]) -> None:
    """Rounds on standard error as they pass, then the table; the last line of standard output is one JSON object."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        report = measure(lambda done, rounds: status.update(f"round {done} of {rounds}"))
    Console().print(report.render())
    print(report.to_json())
