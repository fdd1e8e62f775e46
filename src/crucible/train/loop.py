"""The training loop: one function from a config to a run folder."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from crucible.data.loader import LoaderState
from crucible.train import budget, checkpoint, folder
from crucible.train.checkpoint import Checkpoint, TrainingState
from crucible.train.config import TrainConfig, TrainError
from crucible.train.events import Interrupting, Notice, OnEvent, Saved, Started, Stepped
from crucible.train.inputs import Inputs
from crucible.train.interrupt import Interrupt
from crucible.train.metrics import DeviceMonitor, LogRow, LogWriter, Pace, SpeedWatch
from crucible.train.optim import load_state_tensors, state_tensors
from crucible.train.schedule import cooldown_steps, learning_rate, steps_falling_after
from crucible.train.step import Learner, NonFiniteError

_HARDWARE_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended."""

    run: Path
    step: int
    steps: int
    tokens: int
    """Targets trained on since step 1, padding not counted."""
    val_loss: float | None
    """Nats per token after `step`, or None where the run was interrupted between evaluations."""
    best_step: int | None
    """The checkpoint that `best` points to, None where none has been evaluated yet."""
    best_val_loss: float | None
    interrupted: str | None
    """Name of the signal that ended it early; None where all steps are done."""
    seconds: float
    """Wall time of this call."""

    def summary(self) -> str:
        """How it ended and, where it was interrupted, how it goes on; for people, a line each."""
        lines = [f"{self.run}: step {self.step:,} of {self.steps:,}, {self.tokens:,} tokens seen"]
        if self.best_val_loss is not None:
            lines[0] += (
                f"; validation loss {self.best_val_loss:.4f} nats per token at its best, step {self.best_step:,}"
            )
        if self.interrupted is not None:
            lines.append(
                f"Interrupted by {self.interrupted}; step {self.step:,} is saved. "
                f"Go on with: crucible train --run {self.run} --resume"
            )
        return "\n".join(lines)


def train(config: TrainConfig, *, resume: bool = False, on_event: OnEvent | None = None) -> TrainResult:
    """Trains a model, or goes on with an interrupted run, until its last step or a signal.

    On the CPU, with the same number of threads, a run interrupted and resumed any number of times, by Ctrl-C, SIGTERM
    or a kill at any moment, ends with the same bits as one left alone: parameters, optimizer, and log.csv but for its
    timings. The first SIGINT or SIGTERM finishes the step, saves and returns; the second acts as it would without us.
    torch's own generators are seeded with `config.seed`, or set to where the checkpoint left them.

    Args:
        config: see `TrainConfig`.
        resume: go on from the run's `last` checkpoint (from the beginning where it has saved none); the config must
            be the one it was started with, but for what `TrainConfig.check_resume` allows.
        on_event: called with everything worth watching, in the thread of the run.

    Raises:
        ConfigError: the config asks for what this machine lacks.
        DataError, TrainError: data, run folder, config and checkpoint contradict one another, a loss or gradient is
            not finite, or memory runs out; the message names the remedy. Checkpoints saved before are intact.
        CheckpointError, LogError: a checkpoint or the log cannot be read or written (disk full); checkpoints saved
            before are intact.
    """
    began = time.monotonic()
    emit: OnEvent = on_event or (lambda event: None)
    stored = folder.read(config.run) if resume else None
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(lambda name: emit(Interrupting(name))))
        stack.enter_context(folder.locked(config.run))
        if stored is None:
            folder.check_vacant(config.run)
        inputs = Inputs.open(config)
        learner = Learner(config)
        trainer = Trainer(config, inputs, learner, emit)
        stack.callback(trainer.close)
        try:
            if stored is None:
                trainer.begin(began)
            else:
                trainer.go_on(stored)
            trainer.run(interrupt)
        except torch.OutOfMemoryError as error:
            raise TrainError(
                f"out of memory on {learner.device_name} with batch_size={config.batch_size}: lower batch_size and "
                "raise grad_accumulation by the same factor"
            ) from error
        except RuntimeError as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = str(error).strip().splitlines()[0]
            raise TrainError(f"torch.compile does not work here ({reason}): give compile=False") from error
        return trainer.result(interrupt.requested, time.monotonic() - began)


class Trainer:
    """The parts of a run and where it stands. `begin` or `go_on`, then `run`, then `close`."""

    def __init__(self, config: TrainConfig, inputs: Inputs, learner: Learner, emit: OnEvent) -> None:
        self.config = config
        self.inputs = inputs
        self.learner = learner
        self.emit = emit
        self.validation = inputs.validation_batches(config)
        self.step = 0
        self.tokens = 0
        self.val_loss: float | None = None
        self.best_step: int | None = None
        self.best_val_loss: float | None = None
        # Under a time budget, until the length of the run is settled: when it should end, and how long ending takes.
        self._deadline: float | None = None
        self._ending_seconds = 0.0
        self._stored_steps = 0
        self._stack = ExitStack()

    def close(self) -> None:
        """Ends the loader's thread and closes the log."""
        self._stack.close()

    def result(self, interrupted: str | None, seconds: float) -> TrainResult:
        """How it ended."""
        return TrainResult(
            run=self.config.run,
            step=self.step,
            steps=self._steps,
            tokens=self.tokens,
            val_loss=self.val_loss,
            best_step=self.best_step,
            best_val_loss=self.best_val_loss,
            interrupted=interrupted if self.step < self._steps else None,
            seconds=seconds,
        )

    # ---- where a run starts -----------------------------------------------------------------------------------------

    def begin(self, began: float) -> None:
        """A new run, its number of steps fixed, its folder written. `began` is when its time budget started to run."""
        time_budget = None
        if self.config.max_minutes is not None:
            time_budget = self._fix_steps(began, self.config.max_minutes)
        self._stored_steps = self._steps
        folder.create(self.config, time_budget=time_budget, inputs=self.inputs, learner=self.learner)
        self._open(None)

    def _fix_steps(self, began: float, max_minutes: float) -> dict[str, float]:
        timings = budget.measure(self.config, self.inputs, self.learner, self.validation)
        steps = budget.steps_within(60 * max_minutes - (time.monotonic() - began), timings, self.config)
        asked, self.config = self.config, self.config.with_steps(steps)
        if asked.schedule == "trapezoid":
            self._deadline = began + 60 * max_minutes
            self._ending_seconds = timings.evaluation_seconds + timings.save_seconds
        self.emit(
            Notice(
                f"{max_minutes:g} minutes are {steps} steps here: {1000 * timings.step_seconds:.4g} ms a step, "
                f"{timings.evaluation_seconds:.3g} s an evaluation, {timings.save_seconds:.3g} s a save"
            )
        )
        return {"max_minutes": max_minutes, "warmup_steps": asked.warmup_steps, **asdict(timings)}

    def go_on(self, stored: folder.StoredRun) -> None:
        """The run that was `stored`, from its last checkpoint, or from its beginning where it has saved none."""
        config = self.config
        if self.inputs.identity != stored.data:
            raise TrainError(f"{config.data} does not hold the data that {config.run} was started with")
        checkpoint.repair(config.run)
        saved = None
        if (config.run / "checkpoints" / "last").exists():
            saved = checkpoint.load(checkpoint.resolve(config.run, "last"))
        before = stored.asked if config.steps is None else stored.config
        config.check_resume(before, saved.state.step if saved else 0)
        if config.steps is None:
            found = stored.config
            config = replace(config, steps=found.steps, max_minutes=None, warmup_steps=found.warmup_steps)
        self.config = config
        self._open(saved)
        if self.step == self._steps:
            return
        environment = folder.environment(self.learner)
        changes = folder.what_changed(stored.environment, environment)
        for change in changes:
            self.emit(Notice(f"the run goes on, perhaps not bit for bit as it would have: {change}"))
        if changes or config != stored.config:
            folder.update(config, after_step=self.step, environment=environment if changes else None)

    def _open(self, saved: Checkpoint | None) -> None:
        """Brings learner, counters, loader and log to where `saved` stands, or to the beginning."""
        position = None
        if saved is None:
            torch.manual_seed(self.config.seed)
        else:
            state = saved.state
            self.learner.model.load_state_dict(saved.tensors)
            load_state_tensors(self.learner.model, self.learner.optimizer, checkpoint.load_optimizer(saved.path))
            checkpoint.restore_rng(state.rng)
            position = LoaderState.from_dict(state.loader)
            self.step, self.tokens, self.val_loss = state.step, state.tokens, state.val_loss
            self.best_step, self.best_val_loss = state.best_step, state.best_val_loss
        self.loader = self._stack.enter_context(self.inputs.loader(self.config, position))
        self.log = LogWriter(self.config.run / folder.LOG_FILE, after=self.step)
        self._stack.callback(self.log.close)

    # ---- going through it -------------------------------------------------------------------------------------------

    def run(self, interrupt: Interrupt) -> None:
        """Step after step until the last, or until a signal asks for an end; saves before it returns."""
        learner = self.learner
        if self.step == self._steps:
            self.emit(Notice(f"all {self._steps:,} steps of {self.config.run} are done"))
            return
        self.emit(
            Started(
                config=self.config,
                first_step=self.step + 1,
                num_parameters=self.config.model.num_parameters(),
                device=learner.device_name,
                dtype=learner.precision,
            )
        )
        monitor = DeviceMonitor(
            device_name=learner.device_name,
            cuda_index=learner.cuda_index,
            dtype=_HARDWARE_DTYPES[learner.precision],
        )
        watch, pace = SpeedWatch(), Pace()
        while self.step < self._steps:
            began = time.perf_counter()
            row = self._take_step(monitor)
            seconds_left = pace.seconds_left(self._steps - self.step)
            self.emit(Stepped(row=row, steps=self._steps, seconds_left=seconds_left))
            change = watch.add(row)
            if change is not None:
                self.emit(Notice(str(change)))
            is_due = self.step % self.config.save_every == 0 or self.step == self._steps
            stop = interrupt.requested is not None
            if is_due or stop:
                self._save(is_due)
            step_seconds = row.ms_per_step / 1000
            pace.add(step_seconds, time.perf_counter() - began - step_seconds)
            if self._deadline is not None:
                self._fit_deadline(self._deadline, pace.seconds_per_step, is_last_chance=stop)
            if stop:
                return

    def _fit_deadline(self, deadline: float, seconds_per_step: float, *, is_last_chance: bool) -> None:
        """Makes a trapezoid as long as the time left allows, for good once its rate has to fall to end in time.

        While the rate is at its peak the length changes nothing about the steps made. config.json always holds a length
        under which that is so for the next step too, so that a kill leaves a run of a definite number of steps.
        """
        step, warmup_steps = self.step, self.config.warmup_steps
        if step < warmup_steps or step == self._steps:
            return
        seconds = deadline - self._ending_seconds - time.monotonic()
        shortest = steps_falling_after(step, warmup_steps=warmup_steps)
        steps = max(shortest, step + int(seconds / seconds_per_step))
        is_settled = steps == shortest
        is_covered = step < self._stored_steps - cooldown_steps(self._stored_steps, warmup_steps)
        self.config = replace(self.config, steps=steps)
        if is_settled or is_last_chance or not is_covered:
            folder.update(self.config)
            self._stored_steps = steps
        if is_settled:
            self._deadline = None
            self.emit(Notice(f"the rate falls from here on: {steps:,} steps in all"))

    def _take_step(self, monitor: DeviceMonitor) -> LogRow:
        """One update, the evaluation if it is due, and their row in the log."""
        config, step = self.config, self.step + 1
        rate = learning_rate(
            step, schedule=config.schedule, peak=config.lr, steps=self._steps, warmup_steps=config.warmup_steps
        )
        began = time.perf_counter()
        batches = [self.loader.next_batch() for _ in range(config.grad_accumulation)]
        for batch in batches:
            self.inputs.check_vocabulary(batch, config)
        try:
            update = self.learner.update(batches, rate)
        except NonFiniteError as error:
            raise self._diverged(f"step {step}: {error}") from None
        seconds = time.perf_counter() - began
        self.step, self.tokens = step, self.tokens + update.num_targets
        is_evaluated = step % config.eval_every == 0 or step == self._steps
        self.val_loss = self.learner.evaluate(self.validation) if is_evaluated else None
        flops_per_second = config.model.flops_per_token(config.context_length) * update.num_targets / seconds
        power_limit_w, sm_clock_mhz = monitor.power_and_clock()
        row = LogRow(
            step=step,
            tokens=self.tokens,
            loss=update.loss,
            val_loss=self.val_loss,
            lr=rate,
            grad_norm=update.grad_norm,
            ms_per_step=1000 * seconds,
            tokens_per_second=update.num_targets / seconds,
            mfu=None if monitor.peak_flops is None else flops_per_second / monitor.peak_flops,
            power_limit_w=power_limit_w,
            sm_clock_mhz=sm_clock_mhz,
        )
        self.log.write(row)
        if self.val_loss is not None and not math.isfinite(self.val_loss):
            raise self._diverged(f"step {step}: validation loss {self.val_loss}")
        return row

    def _save(self, is_due: bool) -> None:
        """A checkpoint of this step. Only one that was due may become `best`: an interruption leaves no trace in it."""
        # An update can leave finite gradients behind it and parameters that are not.
        if not self.learner.parameters_are_finite():
            raise self._diverged(f"step {self.step}: a parameter is not finite")
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        is_best = is_due and self.val_loss is not None and self.val_loss < best
        if is_best:
            self.best_step, self.best_val_loss = self.step, self.val_loss
        self.log.sync()
        path = checkpoint.save(
            self.config.run,
            model_config=self.config.model,
            tensors=self.learner.model.state_dict(),
            optimizer=state_tensors(self.learner.model, self.learner.optimizer),
            state=TrainingState(
                step=self.step,
                tokens=self.tokens,
                val_loss=self.val_loss,
                best_step=self.best_step,
                best_val_loss=self.best_val_loss,
                loader=self.loader.state.to_dict(),
                rng=checkpoint.capture_rng(),
            ),
        )
        self.emit(Saved(step=self.step, path=path, is_best=is_best))

    def _diverged(self, what: str) -> TrainError:
        last, config = self.config.run / "checkpoints" / "last", self.config
        kept = f"The last good checkpoint is {last.resolve()}" if last.exists() else "No checkpoint had been saved yet"
        return TrainError(
            f"{what}; the run has stopped. {kept}. Going on from it would end the same way: start another run with a "
            f"lower lr (now {config.lr:g}) or a longer warm-up (now warmup_steps={config.warmup_steps})"
        )

    @property
    def _steps(self) -> int:
        assert self.config.steps is not None
        return self.config.steps
