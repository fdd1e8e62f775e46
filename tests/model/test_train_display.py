"""What a run looks like: plain lines for a file, a line redrawn in place for a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cells import toy
from rich.console import Console

from crucible.train import display
from crucible.train.config import TrainConfig
from crucible.train.display import Display, describe, duration
from crucible.train.events import Interrupting, Notice, Saved, Started, Stepped
from crucible.train.metrics import LogRow


def row(step: int, val_loss: float | None = None, mfu: float | None = None) -> LogRow:
    return LogRow(
        step=step,
        tokens=160 * step,
        loss=4.125,
        val_loss=val_loss,
        lr=1e-3,
        grad_norm=1.0,
        ms_per_step=100.0,
        tokens_per_second=12345.6,
        mfu=mfu,
        power_limit_w=None,
        sm_clock_mhz=None,
    )


def started(first_step: int = 1) -> Started:
    config = TrainConfig(
        model=toy(), data=Path("d"), run=Path("runs/a"), context_length=16, steps=200, batch_size=5, grad_accumulation=2
    )
    return Started(config=config, first_step=first_step, num_parameters=1_234_000, device="Some Card", dtype="bf16")


def shown(events, *, terminal: bool) -> str:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=terminal, width=120)) as watch:
        for event in events:
            watch(event)
    return file.getvalue()


def test_a_file_gets_the_start_the_evaluations_and_the_notices(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    events = [started(41), *(Stepped(row=row(step), steps=200, seconds_left=None) for step in (41, 42, 43))]
    events += [
        Stepped(row=row(44, 3.5), steps=200, seconds_left=200.0),
        Saved(step=44, path=Path("p"), is_best=True),
        Notice("x [y]"),
    ]
    lines = shown(events, terminal=False).splitlines()
    assert lines == [
        "1.234 M parameters on Some Card, bf16; 200 steps of 160 tokens into runs/a",
        "going on at step 41",
        "step 41/200  loss 4.125  12,346 tok/s",
        "step 44/200  loss 4.125  val 3.500  12,346 tok/s  3m20s left",
        "x [y]",
    ]


def test_a_file_gets_a_line_every_ten_seconds_at_most(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    watch = Display(Console(file=file, force_terminal=False, width=120))
    for step in range(1, 31):
        now[0] += 1.0
        watch(Stepped(row=row(step), steps=200, seconds_left=None))
    assert [line.split("/")[0] for line in file.getvalue().splitlines()] == ["step 1", "step 11", "step 21"]


def test_a_terminal_gets_a_bar_that_keeps_the_latest_validation_loss():
    events = [
        started(),
        Stepped(row=row(1, 3.5), steps=200, seconds_left=None),
        Stepped(row=row(2), steps=200, seconds_left=30.0),
    ]
    text = shown(events, terminal=True)
    assert "step 2/200  loss 4.125  val 3.500  12,346 tok/s  30s left" in text
    assert "━" in text


def test_an_interruption_is_told_at_once_in_both(capfd):
    assert "SIGINT: finishing this step and saving" in shown([started(), Interrupting("SIGINT")], terminal=True)
    shown([started(), Interrupting("SIGTERM")], terminal=False)
    assert "SIGTERM: finishing this step and saving; once more stops at once" in capfd.readouterr().err


def test_a_measured_peak_shows_the_utilisation():
    assert "MFU 41%" in describe(row(1, mfu=0.412), steps=5, val_loss=None, seconds_left=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3599.7, "1h00m"), (7500, "2h05m"), (90_061, "25h01m")],
)
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text
