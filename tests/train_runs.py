"""Toy training runs for the tests of `crucible.train`: a data folder, a config, and what two equal runs share."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
from cells import toy

from crucible.data.shards import write_shard
from crucible.train.config import TrainConfig
from crucible.train.events import Event, OnEvent, Stepped
from crucible.train.metrics import read_log

VOCAB = 67
TIMINGS = {"ms_per_step", "tokens_per_second", "mfu", "power_limit_w", "sm_clock_mhz"}


def write_data(folder: Path, *, tokenizer_id: bytes = b"", vocab_size: int = VOCAB) -> Path:
    """Two train shards and a val shard of text with structure: a noisy walk, so that there is something to learn.

    An epoch is 47 windows of 16: no multiple of any batch size used, so batches run over shard and epoch edges, and
    both shards end in a short window.
    """
    folder.mkdir(parents=True)
    noise = np.random.Philox(7)  # raw draws are the same in every numpy, which the golden curve depends on
    for name, count in (("train_000000", 412), ("train_000001", 331), ("val_000000", 150)):
        steps, jitter = noise.random_raw((2, count))
        tokens = (np.cumsum(1 + steps % 3) + jitter % 2) % VOCAB
        write_shard(folder / f"{name}.bin", tokens, vocab_size=vocab_size, tokenizer_id=tokenizer_id)
    return folder


def toy_run(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    """A config of 12 steps that saves every fourth, over `folder/data`, which is made if it is not there."""
    if not (folder / "data").exists():
        write_data(folder / "data")
    values: dict[str, Any] = {
        "model": toy(),
        "data": folder / "data",
        "run": folder / name,
        "context_length": 16,
        "steps": 12,
        "batch_size": 5,
        "grad_accumulation": 2,
        "lr": 1e-2,
        "warmup_steps": 3,
        "eval_every": 2,
        "eval_tokens": 96,
        "save_every": 4,
        "seed": 3,
        "device": "cpu",
        "dtype": "f32",
    }
    return TrainConfig(**{**values, **changes})


def raise_at(*steps: int, number: signal.Signals = signal.SIGINT) -> OnEvent:
    """An `on_event` that gets a real signal raised as soon as one of `steps` is logged."""

    def on_event(event: Event) -> None:
        if isinstance(event, Stepped) and event.row.step in steps:
            signal.raise_signal(number)

    return on_event


def outcome(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was interrupted: bytes and log rows."""
    result: dict[str, Any] = {
        f"{link}/{file}": (run / "checkpoints" / link / file).read_bytes()
        for link in ("last", "best")
        for file in ("model.safetensors", "optimizer.safetensors", "state.json")
    }
    result["folders"] = sorted(path.name for path in (run / "checkpoints").iterdir())
    result["log"] = [
        {key: value for key, value in dataclasses.asdict(row).items() if key not in TIMINGS}
        for row in read_log(run / "log.csv")
    ]
    return result
