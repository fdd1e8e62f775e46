"""The whole path once, with the text that ships: prepare, train, export, check, generate. `crucible demo` runs it.

Each stage leaves what the next one reads, and finds what an earlier call left: nothing is done twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from crucible.config import PRESETS
from crucible.data.prepare import prepare
from crucible.data.progress import progress_bar
from crucible.data.shards import Shard, list_shards
from crucible.engine.artifact import PROVENANCE_NAME, ArtifactError, read_json
from crucible.engine.request import SamplingParams
from crucible.export.artifact import export_checkpoint, verify_engine
from crucible.llm import LLM
from crucible.train import checkpoint
from crucible.train.config import TrainConfig, recipe
from crucible.train.display import Display, duration
from crucible.train.folder import read
from crucible.train.loop import train

PRESET: Final = "nano"
VAL_FRACTION: Final = 0.05
"""Of 269 chapters: 8 of them, 35,000 tokens, enough for a validation loss that two runs can be compared by."""
SAMPLING: Final = SamplingParams(temperature=0.8, top_k=40, max_tokens=120, seed=7)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the demo keeps its data, its run and its artifact: folders named demo below a root."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data" / "demo"

    @property
    def run(self) -> Path:
        return self.root / "runs" / "demo"

    @property
    def artifact(self) -> Path:
        return self.root / "artifacts" / "demo"


def run(*, minutes: float, prompt: str, root: Path = Path()) -> None:
    """Walks the path below `root`, showing each stage on the terminal.

    Args:
        minutes: training time aimed at; a run that is there keeps its own.
        prompt: what the trained model continues.

    Raises:
        CrucibleError: a stage failed; what the stages before it made stays.
        KeyboardInterrupt: training was interrupted; the next call goes on with it.
    """
    console, places, began = Console(highlight=False), Places(root), time.monotonic()
    _prepare(console, places)
    _train(console, places, minutes)
    _export(console, places)
    _generate(console, places, prompt)
    console.print(f"\n[bold]Done in {duration(time.monotonic() - began)}.[/] What you might do next:")
    for command in _next_commands(places):
        console.print(f"  {command}", style="cyan", soft_wrap=True)


def unigram_entropy(shards: list[Path]) -> float:
    """Nats per token of the best model that ignores context: the entropy of the shards' own token frequencies."""
    counts = np.zeros(0, np.int64)
    for path in shards:
        found = np.bincount(Shard.open(path).tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _prepare(console: Console, places: Places) -> None:
    _head(console, 1, "Prepare", "six novels by Jane Austen, a tokenizer trained on them")
    with progress_bar() as show:
        prepared = prepare(
            ["demo"],
            places.data,
            tokenizer=f"train:{PRESETS[PRESET].vocab_size}",
            val_fraction=VAL_FRACTION,
            progress=show,
        )
    splits = prepared.meta["splits"]
    console.print(
        f"{places.data}: {splits['train']['tokens']:,} tokens to train on, {splits['val']['tokens']:,} to validate"
        + (" (reused)" if prepared.reused else "")
    )


def _train(console: Console, places: Places, minutes: float) -> None:
    _head(
        console,
        2,
        "Train",
        f"the {PRESET} preset for about {minutes:g} minutes; Ctrl-C saves, the same command resumes",
    )
    config = TrainConfig(model=PRESETS[PRESET], data=places.data, run=places.run, max_minutes=minutes, **recipe(PRESET))
    resume = (places.run / "config.json").exists()
    if resume:
        config = read(places.run).config
        if _is_finished(places.run, config):
            console.print(f"{places.run}: {config.steps} steps (reused; delete it to train anew)")
            return
    with Display(console) as display:
        result = train(config, resume=resume, on_event=display)
    if result.interrupted:
        raise KeyboardInterrupt
    entropy = unigram_entropy(list_shards(places.data, "val"))
    console.print(
        f"{places.run}: validation loss {result.best_val_loss:.3f} nats per token at step {result.best_step}; "
        f"guessing by frequency alone would reach {entropy:.3f}"
    )


def _is_finished(run: Path, config: TrainConfig) -> bool:
    try:
        last = checkpoint.load(checkpoint.resolve(run, "last"))
    except checkpoint.CheckpointError:
        return False
    return last.state.step == config.steps


def _export(console: Console, places: Places) -> None:
    _head(console, 3, "Export and check", "an artifact that needs no torch; the engine's logits against PyTorch's")
    best = checkpoint.resolve(places.run, "best")
    reused = _exported_from(places.artifact) == checkpoint.load(best).state.step
    if not reused:
        export_checkpoint(places.run, places.artifact, force=True)
    console.print(f"{places.artifact}" + (": (reused)" if reused else ": written"))
    check = verify_engine(places.artifact, places.run)
    console.print(
        f"logits over {sum(check.lengths)} random tokens: engine and PyTorch differ by at most "
        f"{check.max_relative_error:.1e} relative, likeliest token equal at {check.top1_agreement:.1%} of positions"
    )


def _exported_from(artifact: Path) -> int | None:
    try:
        step = read_json(artifact / PROVENANCE_NAME).get("step")
    except ArtifactError:
        return None
    return step if isinstance(step, int) else None


def _generate(console: Console, places: Places, prompt: str) -> None:
    _head(console, 4, "Generate", f"temperature {SAMPLING.temperature}, top-k {SAMPLING.top_k}, seed {SAMPLING.seed}")
    llm = LLM(places.artifact, backend="reference")
    console.print(prompt, style="bold", end="", markup=False)
    began, tokens = time.monotonic(), 0
    for piece in llm.stream(prompt, SAMPLING):
        console.print(piece.text, end="", markup=False, soft_wrap=True)
        tokens += 1
    console.print(f"\n({tokens} tokens at {tokens / (time.monotonic() - began):.0f} tok/s)", style="dim")


def _next_commands(places: Places) -> list[str]:
    return [
        f".venv/bin/crucible generate {places.artifact} --prompt 'Mr. Darcy' --temperature 0.8 --top-k 40",
        f".venv/bin/crucible inspect {places.artifact}",
        f".venv/bin/crucible train --data {places.data} --run runs/longer --preset nano --minutes 20",
    ]


def _head(console: Console, number: int, title: str, text: str) -> None:
    console.print(f"\n[bold green]{number}/4 {title}[/] [dim]{text}[/]")
