"""From a time budget to a number of steps: timed once, before the run begins, on the work that the run will do."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from safetensors import SafetensorError

from crucible.data.loader import Batch
from crucible.train import checkpoint
from crucible.train.checkpoint import CheckpointError
from crucible.train.config import TrainConfig
from crucible.train.inputs import Inputs
from crucible.train.optim import state_tensors
from crucible.train.step import Learner

WARMUP_UPDATES: Final = 2
"""Updates that are not timed: the first ones compile, allocate and page in."""
MIN_UPDATES: Final = 3
TIMED_FRACTION: Final = 0.03
"""Share of the budget that the timed updates may take, once there are MIN_UPDATES of them."""
MAX_TIMED_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds of one update, one evaluation and one save."""

    step_seconds: float
    evaluation_seconds: float
    save_seconds: float


def measure(config: TrainConfig, inputs: Inputs, learner: Learner, validation: Sequence[Batch]) -> Timings:
    """Times a run's own work and then puts the learner back to where it starts.

    The updates see the run's first batches over and over and have a rate of 0.

    Raises:
        CheckpointError: there is no room for a checkpoint.
        TrainError, torch.OutOfMemoryError: as in the run.
    """
    with inputs.loader(config, prefetch=0) as loader:
        batches = [loader.next_batch() for _ in range(config.grad_accumulation)]
    for batch in batches:
        inputs.check_vocabulary(batch, config)
    for _ in range(WARMUP_UPDATES):
        learner.update(batches, 0.0)
    assert config.max_minutes is not None
    allowed = min(MAX_TIMED_SECONDS, TIMED_FRACTION * 60 * config.max_minutes)
    learner.synchronize()
    began, updates = time.monotonic(), 0
    while updates < MIN_UPDATES or time.monotonic() - began < allowed:
        learner.update(batches, 0.0)
        updates += 1
    learner.synchronize()
    step_seconds = (time.monotonic() - began) / updates

    began = time.monotonic()
    learner.evaluate(validation)
    evaluation_seconds = time.monotonic() - began

    began = time.monotonic()
    scratch = config.run / ".timing"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        checkpoint.write_tensors(scratch, learner.model.state_dict(), state_tensors(learner.model, learner.optimizer))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save into {config.run}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    save_seconds = time.monotonic() - began

    learner.reset()
    return Timings(step_seconds=step_seconds, evaluation_seconds=evaluation_seconds, save_seconds=save_seconds)


def steps_within(seconds: float, timings: Timings, config: TrainConfig) -> int:
    """Updates that fit into `seconds` with their evaluations and saves, the last of each included; at least 1."""
    per_step = (
        timings.step_seconds + timings.evaluation_seconds / config.eval_every + timings.save_seconds / config.save_every
    )
    return max(1, int((seconds - timings.evaluation_seconds - timings.save_seconds) / per_step))
