"""The whole loop at toy size: it learns, keeps a log, heeds signals, and stops with its checkpoints intact."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import toy
from train_runs import outcome, raise_at, toy_run

from crucible.data.loader import Loader
from crucible.data.shards import write_shard
from crucible.train import checkpoint, loop
from crucible.train.checkpoint import CheckpointError
from crucible.train.config import TrainError
from crucible.train.events import Interrupting, Saved, Started, Stepped
from crucible.train.inputs import Inputs
from crucible.train.loop import train
from crucible.train.metrics import read_log
from crucible.train.schedule import learning_rate
from crucible.train.step import Learner

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_says_what_it_did(tmp_path):
    events = []
    result = train(toy_run(tmp_path, steps=30, save_every=10, eval_every=5), on_event=events.append)
    rows = read_log(tmp_path / "run/log.csv")
    assert [row.step for row in rows] == list(range(1, 31))
    assert [row.step for row in rows if row.val_loss is not None] == [5, 10, 15, 20, 25, 30]
    assert abs(rows[0].loss - math.log(67)) < 0.1
    assert rows[-1].val_loss < 2.5 < math.log(67) - 1
    assert (result.step, result.steps, result.interrupted) == (30, 30, None)
    assert result.val_loss == rows[-1].val_loss
    assert result.tokens == rows[-1].tokens
    assert "step 30 of 30" in result.summary()
    assert "resume" not in result.summary()
    assert isinstance(events[0], Started)
    assert [event.row for event in events if isinstance(event, Stepped)] == rows
    saved = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saved] == [10, 20, 30]
    best = min((row for row in rows if row.step in (10, 20, 30)), key=lambda row: row.val_loss)
    assert (result.best_step, result.best_val_loss) == (best.step, best.val_loss)
    for row in rows:
        assert row.lr == learning_rate(row.step, schedule="cosine", peak=1e-2, steps=30, warmup_steps=3)
        assert row.tokens_per_second == pytest.approx(
            (row.tokens - rows[row.step - 2].tokens if row.step > 1 else row.tokens) / row.ms_per_step * 1000
        )


def test_the_log_is_what_a_plain_loop_gets(tmp_path):
    """The slow twin: the same batches, rates and updates, with none of the loop's machinery."""
    config = toy_run(tmp_path, steps=7)
    train(config)
    learner, tokens = Learner(config), 0
    validation = Inputs.open(config).validation_batches(config)
    with Loader(
        sorted(config.data.glob("train*")), batch_size=5, context_length=16, seed=config.seed, prefetch=0
    ) as loader:
        for row in read_log(config.run / "log.csv"):
            rate = learning_rate(row.step, schedule="cosine", peak=1e-2, steps=7, warmup_steps=3)
            update = learner.update([loader.next_batch(), loader.next_batch()], rate)
            tokens += update.num_targets
            val_loss = learner.evaluate(validation) if row.step in (2, 4, 6, 7) else None
            found = (row.tokens, row.loss, row.grad_norm, row.lr, row.val_loss)
            assert found == (tokens, update.loss, update.grad_norm, rate, val_loss)
    saved = checkpoint.load(checkpoint.resolve(config.run, "last"))
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in learner.model.state_dict().items())


def test_best_is_the_saved_step_of_the_lowest_validation_loss(tmp_path):
    """A few windows, learned by heart, make the validation loss rise again."""
    config = toy_run(tmp_path, steps=40, eval_every=2, save_every=2, lr=3e-2, schedule="trapezoid")
    (config.data / "train_000001.bin").unlink()
    write_shard(config.data / "train_000000.bin", np.random.default_rng(1).integers(0, 67, 90), vocab_size=67)
    result = train(config)
    losses = {row.step: row.val_loss for row in read_log(config.run / "log.csv") if row.val_loss is not None}
    best = min(losses, key=losses.get)
    assert 2 <= best < 40
    assert (result.best_step, result.best_val_loss) == (best, losses[best])
    assert checkpoint.load(checkpoint.resolve(config.run, "best")).state.step == best
    assert checkpoint.load(checkpoint.resolve(config.run, "last")).state.step == 40


def test_config_json_is_enough_to_make_the_run_again(tmp_path):
    train(toy_run(tmp_path))
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["num_parameters"] == toy().num_parameters()
    assert stored["environment"]["threads"] == 1
    assert stored["environment"]["versions"]["torch"] == torch.__version__
    assert {shard["name"] for shard in stored["data"]["shards"]} == {
        "train_000000.bin",
        "train_000001.bin",
        "val_000000.bin",
    }
    again = dataclasses.replace(loop.folder.read(tmp_path / "run").config, run=tmp_path / "again")
    train(again)
    assert outcome(tmp_path / "again") == outcome(tmp_path / "run")


# ---- signals --------------------------------------------------------------------------------------------------------


def test_sigterm_is_heeded_like_ctrl_c_and_told_at_once(tmp_path):
    events = []

    def on_event(event):
        events.append(event)
        raise_at(3, number=signal.SIGTERM)(event)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = train(toy_run(tmp_path), on_event=on_event)
    assert (result.step, result.interrupted) == (3, "SIGTERM")
    kinds = [type(event) for event in events]
    assert kinds[-3:] == [Stepped, Interrupting, Saved]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_second_signal_stops_at_once_and_the_run_still_resumes(tmp_path):
    train(toy_run(tmp_path, "whole"))

    def on_event(event):
        if isinstance(event, Stepped) and event.row.step == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(toy_run(tmp_path, "parts"), on_event=on_event)
    train(toy_run(tmp_path, "parts"), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


# ---- what goes wrong on the way -------------------------------------------------------------------------------------


def poison(learner_parameter: str, value: float, at: int):
    """Patches `Learner.update` so that a parameter is overwritten just before update number `at`."""
    real, calls = Learner.update, []

    def update(self, batches, rate):
        calls.append(rate)
        if len(calls) == at:
            with torch.no_grad():
                self.model.get_parameter(learner_parameter)[0] = value
        return real(self, batches, rate)

    return update


def test_a_loss_that_is_not_a_number_stops_with_the_last_good_checkpoint(tmp_path, monkeypatch):
    train(toy_run(tmp_path, "whole"))
    monkeypatch.setattr(Learner, "update", poison("norm.weight", float("nan"), at=7))
    with pytest.raises(
        TrainError, match=r"step 7: loss nan.*last good checkpoint is .*step-00000004.*lower lr \(now 0.01\)"
    ):
        train(toy_run(tmp_path, "parts"))
    monkeypatch.undo()
    assert [row.step for row in read_log(tmp_path / "parts/log.csv")] == [1, 2, 3, 4, 5, 6]
    train(toy_run(tmp_path, "parts"), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_parameters_that_an_update_ruined_are_never_saved(tmp_path, monkeypatch):
    """The update's own loss and gradients were finite: only the evaluation, or a look at the parameters, can tell."""
    train(toy_run(tmp_path, "whole"))
    real = Learner.update

    def ruins(self, batches, rate):
        update = real(self, batches, rate)
        if rate == learning_rate(8, schedule="cosine", peak=1e-2, steps=12, warmup_steps=3):
            with torch.no_grad():
                self.model.norm.weight[0] = float("nan")
        return update

    monkeypatch.setattr(Learner, "update", ruins)
    with pytest.raises(TrainError, match=r"step 8: validation loss nan.*last good checkpoint is .*step-00000004"):
        train(toy_run(tmp_path, "parts"))
    monkeypatch.undo()
    train(toy_run(tmp_path, "parts"), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_huge_rate_ends_in_one_clear_error(tmp_path):
    # Interrupted, so that no evaluation comes before the save: the update itself overflows.
    config = toy_run(tmp_path, lr=1e38, weight_decay=1e3, warmup_steps=0)
    with pytest.raises(TrainError, match=r"step 1: a parameter is not finite.*No checkpoint had been saved yet"):
        train(config, on_event=raise_at(1))
    assert not (config.run / "checkpoints").exists()
    with pytest.raises(TrainError, match=r"step 2: .*gradient norm nan.*lower lr \(now 1e\+30\)"):
        train(toy_run(tmp_path, "other", lr=1e30, warmup_steps=0))


def test_a_disk_that_fills_up_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    train(toy_run(tmp_path, "whole"))
    real = checkpoint.save_file

    def full(tensors, path):
        if "step-00000008" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-00000008: .*No space left"):
        train(toy_run(tmp_path, "parts"))
    monkeypatch.undo()
    assert checkpoint.load(checkpoint.resolve(tmp_path / "parts", "last")).state.step == 4
    train(toy_run(tmp_path, "parts"), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_out_of_memory_names_the_remedy(tmp_path, monkeypatch):
    def update(self, batches, rate):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(TrainError, match="batch_size=5: lower batch_size and raise grad_accumulation"):
        train(toy_run(tmp_path))


def test_a_failing_compiler_names_the_remedy_and_other_errors_pass(tmp_path, monkeypatch):
    class BackendError(RuntimeError):
        __module__ = "torch._dynamo.exc"

    failure = [BackendError("\nno C compiler found\nand much more")]

    def update(self, batches, rate):
        raise failure[0]

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(TrainError, match=r"does not work here \(no C compiler found\): give compile=False"):
        train(toy_run(tmp_path))
    failure[0] = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        train(toy_run(tmp_path, "other"))
