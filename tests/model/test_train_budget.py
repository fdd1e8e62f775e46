"""Time budgets: runs of a fixed number of steps, whatever the machine does to the time."""

from __future__ import annotations

import contextlib
import dataclasses
import signal

import pytest
from train_runs import outcome, toy_run

from crucible.train import budget, loop
from crucible.train.budget import Timings, steps_within
from crucible.train.config import TrainError
from crucible.train.events import Notice, Stepped
from crucible.train.loop import train
from crucible.train.step import Learner

pytestmark = pytest.mark.usefixtures("one_thread")


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
