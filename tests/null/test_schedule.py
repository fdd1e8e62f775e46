"""The learning rate as a function of the step."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.train.schedule import SCHEDULES, cooldown_steps, learning_rate, same_past, steps_falling_after


def rates(schedule: str, steps: int, warmup_steps: int, peak: float = 1.0) -> list[float]:
    return [
        learning_rate(step, schedule=schedule, peak=peak, steps=steps, warmup_steps=warmup_steps)
        for step in range(1, steps + 1)
    ]


def test_warmup_is_linear_and_ends_at_the_peak():
    for schedule in SCHEDULES:
        assert rates(schedule, 100, 4, peak=0.8)[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8], rel=1e-15)


def test_cosine_values():
    got = rates("cosine", 9, 1)
    want = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert got == pytest.approx(want, rel=1e-15)
    assert got[4] == pytest.approx(0.55)
    assert got[-1] == pytest.approx(0.1, rel=1e-12)


def test_trapezoid_values():
    assert rates("trapezoid", 10, 2) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 1.0, 0.5])
    assert rates("trapezoid", 20, 0)[-5:] == pytest.approx([1, 1, 0.75, 0.5, 0.25])


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 400),
    share=st.floats(0, 1),
    peak=st.floats(1e-6, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_never_zero_never_above_the_peak_and_one_hill(schedule, steps, share, peak):
    warmup_steps = int(share * steps)
    found = rates(schedule, steps, warmup_steps, peak)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in found)
    top = max(warmup_steps, 1) - 1
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert found[top] == pytest.approx(peak)


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match="between 1 and 10"):
        learning_rate(step, schedule="cosine", peak=1.0, steps=10, warmup_steps=2)


def test_same_past_is_the_comparison_of_all_rates_so_far():
    for schedule in SCHEDULES:
        for old_steps, new_steps in ((20, 20), (20, 40), (40, 20)):
            for step in range(old_steps + 1):
                old, new = rates(schedule, old_steps, 3)[:step], rates(schedule, new_steps, 3)[:step]
                said = same_past(step, schedule=schedule, warmup_steps=3, old_steps=old_steps, new_steps=new_steps)
                assert said == (old == new and step <= new_steps)


def test_a_trapezoid_can_be_extended_until_it_goes_down():
    going_down = 20 - cooldown_steps(20, 3)

    def can_extend(step: int) -> bool:
        return same_past(step, schedule="trapezoid", warmup_steps=3, old_steps=20, new_steps=30)

    assert can_extend(going_down)
    # The first step of the way down still has the peak.
    assert can_extend(going_down + 1)
    assert not can_extend(going_down + 2)


@given(step=st.integers(1, 600), warmup_steps=st.integers(0, 600))
@settings(max_examples=60, deadline=None)
def test_the_shortest_trapezoid_still_at_its_peak(step, warmup_steps):
    step = max(step, warmup_steps, 1)
    shortest = steps_falling_after(step, warmup_steps=warmup_steps)
    fitting = [
        n for n in range(step + 1, 2 * step + 9) if n >= warmup_steps and n - cooldown_steps(n, warmup_steps) >= step
    ]
    assert shortest == min(fitting)
    found = rates("trapezoid", shortest, warmup_steps)
    assert found[step - 1] == 1.0
    assert min(found[max(warmup_steps, 1) - 1 : step]) == 1.0


def test_importing_the_schedule_and_config_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import crucible.train.schedule, crucible.train.config"
    subprocess.run([sys.executable, "-c", code], check=True)
