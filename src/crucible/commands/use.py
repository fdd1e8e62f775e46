"""Using a model: inspect, generate, logits, tokenize, eval, validate."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crucible.commands import examples
from crucible.errors import CrucibleError

if TYPE_CHECKING:
    from crucible.completion import SamplingParams
    from crucible.llm import LLM

app = typer.Typer()
PANEL = "Use a model"

_MODEL = typer.Argument(
    help="An artifact or Hugging Face folder, a .gguf file, a hub id OWNER/NAME, or `smollm2`.", show_default=False
)
Backend = Annotated[
    Literal["auto", "cpu", "cuda", "reference"], typer.Option(help="Engine backend; auto is the fastest here.")
]
Weights = Annotated[
    Literal["auto", "f32", "f16", "int8"], typer.Option(help="What matrices are held in; auto suits the backend.")
]


@app.command(rich_help_panel=PANEL, epilog=examples("crucible inspect artifacts/demo"))
def inspect(model: Annotated[Path, _MODEL]) -> None:
    """Show a model's architecture, parameter counts and tensors; refuse a malformed file by name."""
    from rich.console import Console

    from crucible.export.inspect import inspect as look

    Console().print(look(model).render())


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible generate artifacts/demo --prompt 'It is a truth' --max-tokens 100",
        "crucible generate artifacts/demo -p 'Emma' --temperature 0.8 --top-k 40 --seed 7",
        "crucible generate smollm2 -p 'Name three rivers of Europe.' --stop '4.'",
    ),
)
def generate(
    model: Annotated[str, _MODEL],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to go on from, or to reply to.", show_default=False)
    ],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", show_default="128, or what the context has left")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that hold this share of probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from those at least this likely relative to the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1234,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.", show_default="none")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Reply to the prompt, or continue it.", show_default="chat if the model has a template"
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of a chat.", show_default="the template's")] = None,
    backend: Backend = "auto",
    weights: Weights = "auto",
    cache: Annotated[bool, typer.Option(help="Keep keys and values; without, the same text takes longer.")] = True,
    echo: Annotated[bool, typer.Option(help="Print a continued prompt before its continuation.")] = True,
) -> None:
    """Continue a prompt, or reply to it, printing text as it comes. Greedy unless a temperature is given."""
    from crucible.completion import SamplingParams
    from crucible.llm import LLM

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=tuple(stop or ())
    )
    llm = LLM(model, backend=backend, weights=weights, num_slots=1)
    if chat is None:
        chat = system is not None or llm.chat_template.source is not None
    if system is not None and not chat:
        raise CrucibleError("--system is a message of a chat; leave out --raw")
    ids = llm.encode_chat(_messages(system, prompt)) if chat else llm.encode(prompt)
    if max_tokens is None:
        max_tokens = max(1, min(params.max_tokens, llm.config.max_position_embeddings - len(ids)))
    params = dataclasses.replace(params, max_tokens=max_tokens)
    _stream(llm, ids, params, use_cache=cache, shown=prompt if echo and not chat else "")


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible logits artifacts/demo --prompt 'It is'", "crucible logits artifacts/demo --ids 464,2159,318"
    ),
)
def logits(
    model: Annotated[str, _MODEL],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text.", show_default=False)] = None,
    backend: Backend = "auto",
    weights: Weights = "auto",
    ids: Annotated[str | None, typer.Option(help="Token ids instead, separated by commas.", show_default=False)] = None,
    top: Annotated[int, typer.Option(help="Tokens to list, likeliest first.", min=1)] = 10,
) -> None:
    """Show what a model predicts after a prompt: sum, range and the highest logits."""
    from crucible.llm import LLM

    if (prompt is None) == (ids is None):
        raise CrucibleError("give exactly one of --prompt and --ids")
    llm = LLM(model, backend=backend, weights=weights, num_slots=1)
    _print_logits(llm, llm.encode(prompt if prompt is not None else _parse_ids(ids or "")), top)


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible tokenize 'The World is a stage'",
        "crucible tokenize --tokenizer artifacts/demo Emma",
        "crucible tokenize --decode 464,2159,318",
    ),
)
def tokenize(
    text: Annotated[str, typer.Argument(help="Text, or ids with --decode.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="`gpt2`, a tokenizer.json or a folder that holds one.")
    ] = "gpt2",
    decode: Annotated[bool, typer.Option("--decode", help="From ids to text.")] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="One line a token: its id and its bytes.")] = False,
) -> None:
    """Show the token ids of a text, or the text of ids."""
    from crucible.tokenizer import Tokenizer

    loaded = Tokenizer.load(tokenizer)
    if decode:
        print(loaded.decode(_parse_ids(text)))
        return
    ids = loaded.encode(text)
    if pieces:
        for token_id in ids:
            print(f"{token_id:>7}  {loaded.token_bytes(token_id)!r}")
    else:
        print(" ".join(map(str, ids)))


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _stream(llm: LLM, ids: tuple[int, ...], params: SamplingParams, *, use_cache: bool, shown: str) -> None:
    """Text to standard output as it comes, then a line about it to standard error."""
    pieces = llm.stream(ids, params, use_cache=use_cache)
    print(shown, end="", flush=True)
    began, tokens, ended = time.perf_counter(), 0, "interrupted"
    try:
        for piece in pieces:
            tokens += 1
            print(piece.text, end="", flush=True)
            ended = piece.finish_reason or ended
    finally:
        print(flush=True)
        seconds = time.perf_counter() - began
        drawn = f"seed {params.seed}" if params.temperature > 0 else "greedy"
        print(f"[{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tok/s; {drawn}; {ended}]", file=sys.stderr)


def _print_logits(llm: LLM, ids: tuple[int, ...], top: int) -> None:
    """The logits after the last of `ids`: what two implementations are compared by at a glance."""
    from crucible.engine.sampling import logprobs, top_tokens

    last_V = llm.logits(ids)[-1]
    print(f"ids   {','.join(map(str, ids))}")
    print(f"sum   {last_V.sum(dtype='float64'):.4f}")
    print(f"min   {last_V.min():.6f}")
    print(f"max   {last_V.max():.6f}")
    print(f"\n{'id':>7}  {'logit':>10}  {'prob':>7}  token")
    logprobs_V = logprobs(last_V)
    for token_id in map(int, top_tokens(last_V, min(top, len(last_V)))):
        known = token_id < llm.tokenizer.vocab_size
        text = repr(llm.tokenizer.decode([token_id])) if known else "(padding)"
        print(f"{token_id:>7}  {last_V[token_id]:>10.6f}  {math.exp(logprobs_V[token_id]):>7.2%}  {text}")


def _parse_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or spaces."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise CrucibleError(f"token ids are integers separated by commas, not {text!r}") from None


@app.command(
    "eval",
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible eval artifacts/demo --data data/demo/val_000000.bin --tokens 8192",
        "crucible eval smollm2 --data demo --tokens 4096 --quant f32,int8 --prefill-ctx 512",
    ),
)
def evaluate(
    model: Annotated[str, _MODEL],
    data: Annotated[str, typer.Option(help="Shards, or text as for `crucible prepare`.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = 8192,
    quant: Annotated[str, typer.Option(help="Weight formats or single roundings side by side, by commas.")] = "f32",
    prefill_ctx: Annotated[
        int | None, typer.Option(help="Score by prefill, windows of so many tokens.", show_default="by decode")
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(help="Tokens per window when scored by decode.", show_default="1024, at most the context"),
    ] = None,
    backend: Backend = "auto",
) -> None:
    """Cross-entropy, perplexity and bits per byte on held-out text. Ctrl-C reports what is done."""
    from rich.console import Console

    from crucible.evaluate import evaluate_model

    if ctx is not None and prefill_ctx is not None:
        raise CrucibleError("give --ctx or --prefill-ctx, not both")
    with Console(stderr=True).status("loading") as status:
        report = evaluate_model(
            model,
            data,
            num_tokens=tokens,
            variants=quant.split(","),
            path="decode" if prefill_ctx is None else "prefill",
            context=ctx if prefill_ctx is None else prefill_ctx,
            backend=backend,
            on_progress=lambda now: status.update(f"{now.scored:,} of {now.asked:,} tokens"),
        )
    Console().print(report.render())


@app.command(
    rich_help_panel=PANEL,
    epilog=examples("crucible validate artifacts/demo", "crucible validate smollm2 --backend cpu --weights int8"),
)
def validate(
    model: Annotated[str, _MODEL],
    backend: Backend = "auto",
    weights: Weights = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Without the long prompts.")] = False,
) -> None:
    """Prove on this machine that a request's bits do not depend on its neighbours, chunks or pages."""
    from crucible.engine.backends import default_weight_format, make_backend, resolve_backend
    from crucible.engine.validate import NUM_SLOTS, pages_needed, report
    from crucible.engine.validate import validate as run
    from crucible.models import resolve

    loaded, name = resolve(model), resolve_backend(backend)
    made = make_backend(
        name,
        loaded.config,
        loaded.weights,
        weight_format=default_weight_format(name) if weights == "auto" else weights,
        num_slots=NUM_SLOTS,
        num_pages=pages_needed(loaded.config),
    )
    is_exact = report(run(made, quick=quick))
    # Of backends whose operands are f16: numbers beyond its range, which were cut.
    if saturated := getattr(made, "saturations", 0):
        print(f"{saturated:,} operands were beyond the range of f16: this model needs another backend")
    if saturated or not is_exact:
        raise typer.Exit(1)
