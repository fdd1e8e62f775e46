"""Interrupted and resumed equals uninterrupted, to the bit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from cells import toy
from train_runs import outcome, raise_at, toy_run

from crucible.train import checkpoint, loop
from crucible.train.events import Notice, Stepped
from crucible.train.loop import train
from crucible.train.metrics import read_log

pytestmark = pytest.mark.usefixtures("one_thread")


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
