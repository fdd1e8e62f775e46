"""From text to a model: prepare, train, export, demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from crucible.commands import examples
from crucible.config import Activation, Attention, Norm, NormPlacement, PosEncoding
from crucible.errors import CrucibleError

app = typer.Typer()
PANEL = "From text to a model"


@app.command(
    rich_help_panel=PANEL,
    epilog=examples(
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
    rich_help_panel=PANEL,
    epilog=examples(
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
        if (steps is None) == (minutes is None):
            raise TrainError("give --steps or --minutes, and not both")
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
    rich_help_panel=PANEL,
    epilog=examples(
        "crucible export runs/demo --out artifacts/demo",
        "crucible export runs/120m --out artifacts/120m --dtype bf16 --which last",
        "crucible export artifacts/120m --out artifacts/120m-int8 --quant int8",
        "crucible export artifacts/120m --to gguf --type q8_0 --out 120m.gguf",
    ),
)
def export(
    source: Annotated[
        Path,
        typer.Argument(help="A run or one of its checkpoints; for --quant and --to gguf a model.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Folder or .gguf file to make.", show_default=False)],
    which: Annotated[Literal["best", "last"], typer.Option(help="Checkpoint of a run.")] = "best",
    to: Annotated[Literal["artifact", "gguf"], typer.Option(help="Our folder, or llama.cpp's file.")] = "artifact",
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"],
        typer.Option("--dtype", "--type", help="How weights are stored: bf16 in an artifact only, q8_0 in .gguf only."),
    ] = "f32",
    quant: Annotated[
        Literal["int8"] | None, typer.Option(help="Store an artifact's matrices in int8.", show_default="none")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Read an artifact back and compare logits with the checkpoint's.")
    ] = True,
) -> None:
    """Make an artifact of a checkpoint: a folder that `crucible generate` and `transformers` load."""
    if quant is not None and (to, dtype) != ("artifact", "f32"):
        raise CrucibleError("--quant int8 makes an artifact and decides its dtype; leave out --to and --dtype")
    if to == "gguf":
        if dtype == "bf16":
            raise CrucibleError("--type bf16 is not written to .gguf; take f32, f16 or q8_0")
        from crucible.export.gguf import export_gguf
        from crucible.models import resolve

        print(f"{export_gguf(resolve(source), out, dtype=dtype, force=force)}: written")
    elif quant is not None:
        from crucible.export.quantise import export_int8

        path = export_int8(source, out, which=which, force=force)
        print(f"{path}: written; its tensors are those of the source in int8, bit for bit")
    elif dtype == "q8_0":
        raise CrucibleError("--type q8_0 is a format of .gguf files: give --to gguf")
    else:
        from crucible.export import artifact

        path = artifact.export_checkpoint(source, out, which=which, dtype=dtype, force=force)
        print(f"{path}: written")
        for check in (artifact.verify, artifact.verify_engine) if verify else ():
            print(check(path, source, which=which))


@app.command(rich_help_panel=PANEL, epilog=examples("crucible demo", "crucible demo --minutes 10"))
def demo(
    minutes: Annotated[float, typer.Option(help="Time to train for.", min=0.1)] = 2.0,
    prompt: Annotated[str, typer.Option(help="What the trained model continues.")] = "It is a truth",
) -> None:
    """Walk the whole path once with the text that ships: prepare, train, export, check, generate.

    What is there already is reused: data/demo, runs/demo and artifacts/demo.
    """
    import crucible.train  # noqa: F401 (before torch: it decides how torch's threads wait)
    from crucible.demo import run

    run(minutes=minutes, prompt=prompt)
