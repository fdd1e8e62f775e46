"""The whole loop at toy size: it learns, it resumes to the bit, it stops cleanly, it refuses what does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import toy
from train_runs import outcome, toy_run, write_data

from crucible.config import PRESETS, ConfigError
from crucible.data.loader import Loader
from crucible.data.shards import DataError, write_shard
from crucible.tokenizer import Tokenizer
from crucible.train import budget, checkpoint, loop
from crucible.train.budget import Timings, steps_within
from crucible.train.checkpoint import CheckpointError
from crucible.train.config import TrainError
from crucible.train.events import Interrupting, Notice, Saved, Started, Stepped
from crucible.train.inputs import Inputs, model_for
from crucible.train.loop import train
from crucible.train.metrics import read_log
from crucible.train.schedule import learning_rate
from crucible.train.step import Learner


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def raise_at(*steps: int, number: int = signal.SIGINT):
    """An `on_event` that gets a real signal raised as soon as one of `steps` is logged."""

    def on_event(event):
        if isinstance(event, Stepped) and event.row.step in steps:
            signal.raise_signal(number)

    return on_event


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


# ---- interrupted and resumed ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A folder with `data`, and the outcome of a run of 12 steps in which 120 windows of an epoch of 47 are used."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    torch.set_num_threads(1)
    train(toy_run(folder))
    return folder, outcome(folder / "run")


@pytest.mark.parametrize(
    "interruptions",
    [
        [4],  # at a checkpoint that was due
        [5],  # between evaluations, just past the first epoch's edge (window 47 of 50)
        [1, 2, 3, 5, 8, 9, 11],  # again and again, after one step too
        [9, 10],  # in the third epoch
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, interruptions):
    folder, expected = uninterrupted
    config = toy_run(folder, "unused")
    config = dataclasses.replace(config, run=tmp_path / "run")
    for number, step in enumerate(interruptions):
        result = train(config, resume=number > 0, on_event=raise_at(step))
        assert (result.step, result.interrupted) == (step, "SIGINT")
        assert f"crucible train --run {config.run} --resume" in result.summary()
        assert checkpoint.load(checkpoint.resolve(config.run, "last")).state.step == step
    result = train(config, resume=True)
    assert (result.step, result.interrupted) == (12, None)
    assert outcome(config.run) == expected


def test_a_run_killed_between_saves_starts_again_from_the_last_one(uninterrupted, tmp_path):
    """As after SIGKILL at step 7: rows 5 to 7 are in the log, the last checkpoint is of step 4."""
    folder, expected = uninterrupted
    config = dataclasses.replace(toy_run(folder, "unused"), run=tmp_path / "run")

    class Killed(BaseException):
        pass

    def on_event(event):
        if isinstance(event, Stepped) and event.row.step == 7:
            raise Killed

    with pytest.raises(Killed):
        train(config, on_event=on_event)
    assert len(read_log(config.run / "log.csv")) == 7
    events = []
    train(config, resume=True, on_event=events.append)
    assert events[0].first_step == 5
    assert outcome(config.run) == expected


def test_a_run_killed_before_its_first_save_starts_at_the_beginning(uninterrupted, tmp_path):
    folder, expected = uninterrupted
    config = dataclasses.replace(toy_run(folder, "unused"), run=tmp_path / "run")
    train(config, on_event=raise_at(2))
    for path in (config.run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    train(config, resume=True)
    assert outcome(config.run) == expected


def test_resuming_a_finished_run_changes_nothing(uninterrupted):
    folder, expected = uninterrupted
    events = []
    result = train(toy_run(folder), resume=True, on_event=events.append)
    assert (result.step, result.interrupted) == (12, None)
    assert result.val_loss == result.best_val_loss == expected["log"][-1]["val_loss"]
    assert events == [Notice(f"all 12 steps of {folder / 'run'} are done")]
    assert outcome(folder / "run") == expected


def test_bf16_resumes_to_the_bit_too(tmp_path):
    train(toy_run(tmp_path, "whole", dtype="bf16"))
    train(toy_run(tmp_path, "parts", dtype="bf16"), on_event=raise_at(5))
    train(toy_run(tmp_path, "parts", dtype="bf16"), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_two_threads_resume_to_the_bit_too(tmp_path):
    """A model whose matrices are large enough for torch to share their rows among threads."""
    torch.set_num_threads(2)
    model = toy(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    changes = {"model": model, "steps": 2, "warmup_steps": 0, "batch_size": 16, "grad_accumulation": 1}
    train(toy_run(tmp_path, "whole", **changes))
    train(toy_run(tmp_path, "parts", **changes), on_event=raise_at(1))
    train(toy_run(tmp_path, "parts", **changes), resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_a_trapezoid_extended_in_time_equals_one_that_was_long_from_the_start(tmp_path):
    long = {"schedule": "trapezoid", "steps": 16}
    train(toy_run(tmp_path, "long", **long))
    train(toy_run(tmp_path, "short", schedule="trapezoid"), on_event=raise_at(9))
    train(toy_run(tmp_path, "short", **long), on_event=raise_at(11), resume=True)
    extended = loop.folder.read(tmp_path / "short").config
    assert extended == toy_run(tmp_path, "short", **long)
    train(extended, resume=True)
    assert outcome(tmp_path / "short") == outcome(tmp_path / "long")


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


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_an_existing_run_is_never_overwritten(tmp_path):
    train(toy_run(tmp_path), on_event=raise_at(2))
    before = outcome_files(tmp_path / "run")
    with pytest.raises(TrainError, match=r"run already holds a run: resume it \(--resume\) or give another folder"):
        train(toy_run(tmp_path))
    assert outcome_files(tmp_path / "run") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    with pytest.raises(TrainError, match=r"other holds other files \(thesis.tex\)"):
        train(toy_run(tmp_path, "other"))


def outcome_files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(TrainError, match=r"run holds no run to resume \(no config.json\)"):
        train(toy_run(tmp_path), resume=True)
    assert not (tmp_path / "run").exists()


def test_resume_with_another_config_or_other_data_is_refused_and_changes_nothing(tmp_path):
    train(toy_run(tmp_path), on_event=raise_at(6))
    before = outcome_files(tmp_path / "run")
    with pytest.raises(TrainError, match=r"batch_size was 5, is 4; lr was 0.01, is 0.02"):
        train(toy_run(tmp_path, lr=2e-2, batch_size=4), resume=True)
    with pytest.raises(TrainError, match="number of steps can only change"):
        train(toy_run(tmp_path, steps=30), resume=True)
    tokens = np.arange(331) % 67
    write_shard(tmp_path / "data/train_000001.bin", tokens, vocab_size=67)
    with pytest.raises(TrainError, match="does not hold the data"):
        train(toy_run(tmp_path), resume=True)
    assert outcome_files(tmp_path / "run") == before


def test_a_moved_run_over_moved_data_goes_on(uninterrupted, tmp_path):
    expected = uninterrupted[1]
    train(toy_run(tmp_path), on_event=raise_at(5))
    (tmp_path / "elsewhere").mkdir()
    for name in ("data", "run"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    train(toy_run(tmp_path / "elsewhere"), resume=True)
    assert outcome(tmp_path / "elsewhere/run") == expected


def test_another_environment_is_allowed_and_told(tmp_path):
    train(toy_run(tmp_path), on_event=raise_at(5))
    path = tmp_path / "run/config.json"
    stored = json.loads(path.read_text())
    stored["environment"]["threads"] = 64
    stored["environment"]["versions"]["torch"] = "2.11.0"
    path.write_text(json.dumps(stored))
    events = []
    train(toy_run(tmp_path), resume=True, on_event=events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("threads was 64, is 1" in text for text in notices)
    assert any("torch was 2.11.0" in text for text in notices)
    (noted,) = json.loads(path.read_text())["resumed_in"]
    assert noted["after_step"] == 5
    assert noted["environment"]["threads"] == 1


def test_only_one_process_trains_in_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    code = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(TrainError, match="another process is training in"):
            train(toy_run(tmp_path))
        other.stdin.close()
    train(toy_run(tmp_path, steps=1, warmup_steps=0))


def test_data_and_model_must_fit(tmp_path):
    with pytest.raises(TrainError, match=r"vocabulary of 67 tokens, the model's vocab_size is 64"):
        train(toy_run(tmp_path, model=toy(vocab_size=64)))
    assert not (tmp_path / "run").exists()
    (tmp_path / "data/val_000000.bin").unlink()
    with pytest.raises(DataError, match="val"):
        train(toy_run(tmp_path))


def test_a_token_that_the_shards_do_not_promise_is_found(tmp_path):
    """A shard from elsewhere that does not state its vocabulary."""
    config = toy_run(tmp_path, model=toy(vocab_size=60))
    for path in config.data.iterdir():
        content = bytearray(path.read_bytes())
        content[12:16] = bytes(4)
        path.write_bytes(content)
    only_val = toy_run(tmp_path, "other", model=toy(vocab_size=60), data=tmp_path / "only-val")
    shutil.copytree(config.data, only_val.data)
    for number in range(2):
        write_shard(only_val.data / f"train_00000{number}.bin", np.arange(50), vocab_size=60)
    with pytest.raises(TrainError, match=r"only-val holds token 6\d"):
        train(only_val)
    with pytest.raises(TrainError, match=r"data holds token 6\d, the model's vocab_size is 60"):
        train(config)
    train(toy_run(tmp_path, "fits", steps=2, warmup_steps=0))


def test_shards_of_another_tokenizer_are_refused_and_the_run_gets_its_own(tmp_path):
    tokenizer = Tokenizer.train(["a b a b c"] * 20, vocab_size=260)
    ours, theirs = tokenizer.sha256[:8], bytes(range(8))
    write_data(tmp_path / "data", tokenizer_id=ours, vocab_size=260)
    tokenizer.save(tmp_path / "data/tokenizer.json")
    model = toy(vocab_size=260)
    train(toy_run(tmp_path, model=model, steps=1, warmup_steps=0))
    assert Tokenizer.from_file(tmp_path / "run/tokenizer.json").sha256 == tokenizer.sha256
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["data"]["tokenizer_sha256"] == tokenizer.sha256.hex()
    write_shard(tmp_path / "data/val_000000.bin", np.arange(60), vocab_size=260, tokenizer_id=theirs)
    with pytest.raises(TrainError, match=f"{theirs.hex()}.*{ours.hex()}"):
        train(toy_run(tmp_path, "other", model=model))
    (tmp_path / "data/tokenizer.json").unlink()
    with pytest.raises(TrainError, match=f"{theirs.hex()}.*{ours.hex()}"):
        train(toy_run(tmp_path, "other", model=model))


@pytest.mark.parametrize(("stated", "expected"), [(67, 128), (2048, 2048), (50257, 50304), (0, 50304)])
def test_a_preset_gets_the_vocabulary_of_its_data(tmp_path, stated, expected):
    data = write_data(tmp_path / "data", vocab_size=stated or 67)
    if not stated:
        for path in data.iterdir():
            content = bytearray(path.read_bytes())
            content[12:16] = bytes(4)
            path.write_bytes(content)
    assert model_for("30m", data, {}) == PRESETS["30m"].vary(vocab_size=expected)
    assert model_for("30m", data, {"vocab_size": 70_000, "norm": "layernorm"}).vocab_size == 70_000
    with pytest.raises(ConfigError, match="unknown key dropout"):
        model_for("30m", data, {"dropout": 0.1})


# ---- time budgets ---------------------------------------------------------------------------------------------------


class Clock:
    """Time that only updates take: `seconds(number)` for the update of that number in this process."""

    def __init__(self, monkeypatch, seconds, timed=None):
        self.now, self.updates, self.seconds = 0.0, 0, seconds
        real = Learner.update

        def update(learner, batches, rate):
            self.updates += 1
            self.now += self.seconds(self.updates)
            return real(learner, batches, rate)

        monkeypatch.setattr(Learner, "update", update)
        monkeypatch.setattr(loop, "time", self)
        timings = Timings(step_seconds=timed or seconds(1), evaluation_seconds=0.0, save_seconds=0.0)
        monkeypatch.setattr(budget, "measure", lambda *arguments: timings)

    def monotonic(self):
        return self.now

    perf_counter = monotonic


BUDGET = {"steps": None, "max_minutes": 0.5, "warmup_steps": 4, "eval_every": 4, "save_every": 8}


@pytest.mark.parametrize("schedule", ["cosine", "trapezoid"])
def test_a_time_budget_is_a_run_of_fixed_steps(tmp_path, schedule):
    events = []
    changes = {**BUDGET, "max_minutes": 0.005, "schedule": schedule}
    result = train(toy_run(tmp_path, **changes), on_event=events.append)
    assert isinstance(events[0], Notice)
    assert "steps here" in events[0].text
    assert result.steps == result.step >= 1
    stored = loop.folder.read(tmp_path / "run")
    assert (stored.config.steps, stored.config.max_minutes) == (result.steps, None)
    assert (stored.asked.steps, stored.asked.max_minutes, stored.asked.warmup_steps) == (None, 0.005, 4)
    # The number of steps is all that the budget leaves behind: given outright, it makes the same run.
    again = dataclasses.replace(stored.config, run=tmp_path / "again")
    train(again)
    assert outcome(tmp_path / "again") == outcome(tmp_path / "run")


@pytest.mark.parametrize(
    ("seconds", "timed", "steps"),
    [
        (lambda number: 1.0, 1.0, 60),  # as timed
        (lambda number: 1.0, 0.25, 60),  # four times slower than timed
        (lambda number: 1.0, 6.0, 60),  # six times faster than timed
        (lambda number: 1.0 if number <= 20 else 2.0, 1.0, 40),  # a machine that gets hot
        (lambda number: 2.0 if number <= 10 else 0.5, 2.0, 90),  # and one that is left alone
    ],
)
def test_a_trapezoid_ends_in_time_whatever_was_timed(tmp_path, monkeypatch, seconds, timed, steps):
    clock = Clock(monkeypatch, seconds, timed)
    result = train(toy_run(tmp_path, **BUDGET | {"max_minutes": 1.0, "schedule": "trapezoid"}))
    assert clock.now == pytest.approx(60, abs=3)
    assert result.step == result.steps == pytest.approx(steps, abs=2)
    monkeypatch.undo()
    train(dataclasses.replace(loop.folder.read(tmp_path / "run").config, run=tmp_path / "again"))
    assert outcome(tmp_path / "again") == outcome(tmp_path / "run")


def test_a_cosine_keeps_the_steps_it_was_given(tmp_path, monkeypatch):
    Clock(monkeypatch, lambda number: 1.0, timed=4.0)
    assert train(toy_run(tmp_path, **BUDGET)).steps == steps_within(30, budget.measure(), toy_run(tmp_path, **BUDGET))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("step", [2, 11, 23, 26])
def test_a_time_budget_cut_off_anywhere_resumes_as_a_run_of_fixed_steps(tmp_path, monkeypatch, step, number):
    """Timed three times too slow, so that the first estimate of 10 steps is behind the run for most of it."""

    class Killed(BaseException):
        pass

    def on_event(event):
        if isinstance(event, Stepped) and event.row.step == step:
            if number == signal.SIGKILL:
                raise Killed
            signal.raise_signal(number)

    Clock(monkeypatch, lambda number: 1.0, timed=3.0)
    config = toy_run(tmp_path, **BUDGET, schedule="trapezoid")
    with contextlib.suppress(Killed):
        assert train(config, on_event=on_event).interrupted == "SIGINT"
    monkeypatch.setattr(budget, "measure", lambda *arguments: pytest.fail("timed again"))
    with pytest.raises(TrainError, match=r"max_minutes was 0.5, is 2.0"):
        train(dataclasses.replace(config, max_minutes=2.0), resume=True)
    with pytest.raises(TrainError, match=r"warmup_steps was 4, is 3"):
        train(dataclasses.replace(config, warmup_steps=3), resume=True)
    result = train(config, resume=True)
    stored = loop.folder.read(config.run).config
    assert result.step == result.steps == stored.steps
    train(dataclasses.replace(stored, run=tmp_path / "again"))
    assert outcome(tmp_path / "again") == outcome(tmp_path / "run")


def test_steps_within_counts_evaluations_and_saves(tmp_path):
    config = toy_run(tmp_path, eval_every=10, save_every=20)
    timings = Timings(step_seconds=0.1, evaluation_seconds=2.0, save_seconds=4.0)
    steps = steps_within(60.0, timings, config)
    spent = steps * 0.1 + (steps // 10 + 1) * 2.0 + (steps // 20 + 1) * 4.0
    assert 0.9 * 60 < spent <= 60
    assert steps_within(0.5, timings, config) == 1
