"""The command line: one entry point, `crucible`. Commands only read options and print; the work is in the packages.

Anything heavy is imported inside the command that needs it, so that `crucible --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import crucible
from crucible.config import Activation, Attention, ConfigError, Norm, NormPlacement, PosEncoding
from crucible.errors import CrucibleError

if TYPE_CHECKING:
    from crucible.engine.request import SamplingParams
    from crucible.llm import LLM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)

_MODEL = typer.Argument(help="Folder of an artifact, as `crucible export` makes it.", show_default=False)


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
        print(f"crucible: {error.name} is not installed; pip install '.[{extra}]' in the checkout", file=sys.stderr)
        sys.exit(1)


_EXTRAS = {"torch": "train", "datasets": "data", "pyarrow": "data", "zstandard": "data"}


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


def _examples(*commands: str) -> str:
    # A blank line between them: typer joins the lines of a paragraph.
    return "\n\n".join(("Examples:" if len(commands) > 1 else "Example:", *(f"  {command}" for command in commands)))


# ---- text to artifact -------------------------------------------------------------------------------------------

_PATH = "From text to a model"
_USE = "Use a model"
_MACHINE = "This machine"


@app.command(
    rich_help_panel=_PATH,
    epilog=_examples(
        "crucible prepare demo --out data/demo --tokenizer train:2048",
        "crucible prepare 'books/*.txt' notes.jsonl.gz --out data/mine --limit-tokens 10000000",
        "crucible prepare hf:HuggingFaceFW/fineweb-edu --out data/fineweb --limit-tokens 1000000000",
    ),
)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files, folders, globs, `hf:OWNER/NAME` or `demo` (ships).", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Folder of shards to make, or to go on with.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="`gpt2`, a tokenizer.json, or `train:N` for a new one of N tokens.")
    ] = "gpt2",
    limit_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.", show_default="none")] = None,
    val_fraction: Annotated[float, typer.Option(help="Share of documents held out for validation.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.")] = 100_000_000,
    workers: Annotated[int, typer.Option(help="Processes that encode; one uses the cores by threads.")] = 1,
    text_field: Annotated[str, typer.Option(help="Field of .jsonl and .parquet records that holds the text.")] = "text",
    force: Annotated[bool, typer.Option("--force", help="Start anew what was prepared with other options.")] = False,
) -> None:
    """Turn text into token shards, split into training and validation documents.

    Interrupted work goes on where it stopped when the same command is given again.
    """
    from crucible.data.prepare import prepare as run
    from crucible.data.progress import progress_bar

    with progress_bar() as show:
        prepared = run(
            sources,
            out,
            tokenizer=tokenizer,
            limit_tokens=limit_tokens,
            val_fraction=val_fraction,
            shard_tokens=shard_tokens,
            workers=workers,
            text_field=text_field,
            force=force,
            progress=show,
        )
    for source in prepared.meta["sources"]:
        for ending, count in source.get("skipped", {}).items():
            print(f"{source['name']}: {count} files passed over, of unknown kind {ending}", file=sys.stderr)
    for name, split in prepared.meta["splits"].items():
        print(f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens, {split['shards']} shard(s)")
    print(f"{out}: {'was finished already, nothing to do' if prepared.reused else 'prepared'}")


_AXIS = "Architecture (default: the preset's)"
_RUN = "Training (default: the preset's recipe)"
Maybe = typer.Option(show_default=False)


@app.command(
    rich_help_panel=_PATH,
    epilog=_examples(
        "crucible train --data data/demo --run runs/demo --preset nano --minutes 2",
        "crucible train --data data/fineweb --run runs/120m --preset 120m --steps 20000",
        "crucible train --run runs/120m --resume",
    ),
)
def train(
    run: Annotated[Path, typer.Option(help="Folder that the run makes, or goes on in.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="Folder of `crucible prepare`.", show_default=False)] = None,
    preset: Annotated[str, typer.Option(help="nano, 30m, 120m or 350m.")] = "nano",
    steps: Annotated[int | None, typer.Option(help="Updates to make.", show_default=False)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Instead of --steps: as many as fit into this time here.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run; it knows its options.")
    ] = False,
    attention: Annotated[Attention | None, typer.Option(rich_help_panel=_AXIS, show_default=False)] = None,
    pos_encoding: Annotated[PosEncoding | None, typer.Option(rich_help_panel=_AXIS, show_default=False)] = None,
    activation: Annotated[Activation | None, typer.Option(rich_help_panel=_AXIS, show_default=False)] = None,
    norm: Annotated[Norm | None, typer.Option(rich_help_panel=_AXIS, show_default=False)] = None,
    norm_placement: Annotated[NormPlacement | None, typer.Option(rich_help_panel=_AXIS, show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    grad_accumulation: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    context_length: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    lr: Annotated[float | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    warmup_steps: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    schedule: Annotated[
        Literal["cosine", "trapezoid"] | None, typer.Option(rich_help_panel=_RUN, show_default=False)
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    grad_clip: Annotated[float | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    eval_every: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    eval_tokens: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    save_every: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_RUN, show_default=False)] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(rich_help_panel=_RUN, show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["auto", "f32", "bf16"] | None, typer.Option(rich_help_panel=_RUN, show_default=False)
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", rich_help_panel=_RUN, show_default=False)
    ] = None,
) -> None:
    """Train a model on prepared shards, with checkpoints, a log and resumption.

    Ctrl-C finishes the step, saves and says how to go on.
    """
    from crucible.train.config import TrainConfig, TrainError, recipe
    from crucible.train.display import Display
    from crucible.train.folder import read
    from crucible.train.loop import train as run_training

    axes = _given(
        attention=attention, pos_encoding=pos_encoding, activation=activation, norm=norm, norm_placement=norm_placement
    )
    fields = _given(
        data=data,
        steps=steps,
        max_minutes=minutes,
        batch_size=batch_size,
        grad_accumulation=grad_accumulation,
        context_length=context_length,
        lr=lr,
        warmup_steps=warmup_steps,
        schedule=schedule,
        weight_decay=weight_decay,
        grad_clip=grad_clip,
        eval_every=eval_every,
        eval_tokens=eval_tokens,
        save_every=save_every,
        seed=seed,
        device=device,
        dtype=dtype,
        compile=compile,
    )
    if resume:
        stored = read(run).config.to_dict() | {"run": run}
        config = TrainConfig.from_dict(stored | {k: str(v) if k == "data" else v for k, v in fields.items()})
        if axes:
            raise TrainError(f"--resume goes on with the model of {run}; leave out --{', --'.join(axes)}")
    else:
        if data is None:
            raise TrainError("--data is needed: a folder that `crucible prepare` made")
        from crucible.train.inputs import model_for

        config = TrainConfig(model=model_for(preset, data, axes), run=run, **recipe(preset) | fields)
    with Display() as display:
        result = run_training(config, resume=resume, on_event=display)
    print(result.summary())
    if result.interrupted:
        raise typer.Exit(130)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command(
    rich_help_panel=_PATH,
    epilog=_examples(
        "crucible export runs/demo --out artifacts/demo",
        "crucible export runs/120m --out artifacts/120m --dtype bf16 --which last",
    ),
)
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one of its checkpoints.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to make.", show_default=False)],
    which: Annotated[Literal["best", "last"], typer.Option(help="Checkpoint of the run.")] = "best",
    dtype: Annotated[Literal["f32", "f16", "bf16"], typer.Option(help="How weights are stored.")] = "f32",
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that is there.")] = False,
    verify: Annotated[bool, typer.Option(help="Read it back and compare logits with the checkpoint's.")] = True,
) -> None:
    """Make an artifact of a checkpoint: a folder that `crucible generate` and `transformers` load."""
    from crucible.export import artifact

    path = artifact.export_checkpoint(run, out, which=which, dtype=dtype, force=force)
    print(f"{path}: written")
    if verify:
        for check in (artifact.verify, artifact.verify_engine):
            print(check(path, run, which=which))


# ---- a model in use ---------------------------------------------------------------------------------------------


@app.command(rich_help_panel=_USE, epilog=_examples("crucible inspect artifacts/demo"))
def inspect(model: Annotated[Path, _MODEL]) -> None:
    """Show a model's architecture, parameter counts and tensors; refuse a malformed file by name."""
    from rich.console import Console

    from crucible.export.inspect import inspect as look

    Console().print(look(model).render())


@app.command(
    rich_help_panel=_USE,
    epilog=_examples(
        "crucible generate artifacts/demo --prompt 'It is a truth' --max-tokens 100",
        "crucible generate artifacts/demo -p 'Emma' --temperature 0.8 --top-k 40 --seed 7",
    ),
)
def generate(
    model: Annotated[str, _MODEL],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to go on from.", show_default=False)],
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", show_default="128, or what the context has left")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that hold this share of probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from those at least this likely relative to the best.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1234,
    cache: Annotated[bool, typer.Option(help="Keep keys and values; without, the same text takes longer.")] = True,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its continuation.")] = True,
) -> None:
    """Continue a prompt, printing text as it comes. Greedy unless a temperature is given."""
    from crucible.engine.request import SamplingParams
    from crucible.llm import LLM

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    llm = LLM(model)
    if max_tokens is None:
        left = llm.config.max_position_embeddings - len(llm.encode(prompt))
        max_tokens = max(1, min(params.max_tokens, left))
    _stream(llm, prompt, dataclasses.replace(params, max_tokens=max_tokens), use_cache=cache, echo=echo)


@app.command(
    rich_help_panel=_USE,
    epilog=_examples(
        "crucible logits artifacts/demo --prompt 'It is'", "crucible logits artifacts/demo --ids 464,2159,318"
    ),
)
def logits(
    model: Annotated[str, _MODEL],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text.", show_default=False)] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead, separated by commas.", show_default=False)] = None,
    top: Annotated[int, typer.Option(help="Tokens to list, likeliest first.", min=1)] = 10,
) -> None:
    """Show what a model predicts after a prompt: sum, range and the highest logits."""
    from crucible.llm import LLM

    if (prompt is None) == (ids is None):
        raise CrucibleError("give exactly one of --prompt and --ids")
    llm = LLM(model)
    _print_logits(llm, llm.encode(prompt if prompt is not None else _parse_ids(ids or "")), top)


@app.command(
    rich_help_panel=_USE,
    epilog=_examples(
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


def _stream(llm: LLM, prompt: str, params: SamplingParams, *, use_cache: bool, echo: bool) -> None:
    """Text to standard output as it comes, then a line about it to standard error."""
    pieces = llm.stream(prompt, params, use_cache=use_cache)
    print(prompt if echo else "", end="", flush=True)
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


# ---- the machine ------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=_MACHINE, epilog=_examples("crucible doctor"))
def doctor() -> None:
    """Check what this machine has and lacks, with a remedy for each lack."""
    from crucible.doctor import exit_code, render, run_checks

    checks = run_checks()
    render(checks)
    raise typer.Exit(exit_code(checks))


@app.command(rich_help_panel=_PATH, epilog=_examples("crucible demo", "crucible demo --minutes 10"))
def demo(
    minutes: Annotated[float, typer.Option(help="Time to train for.", min=0.1)] = 2.0,
    prompt: Annotated[str, typer.Option(help="What the trained model continues.")] = "It is a truth",
) -> None:
    """Walk the whole path once with the text that ships: prepare, train, export, check, generate.

    What is there already is reused: data/demo, runs/demo and artifacts/demo.
    """
    from crucible.demo import run

    run(minutes=minutes, prompt=prompt)


if __name__ == "__main__":
    main()
