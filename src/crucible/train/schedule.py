"""The learning rate as a pure function of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

Schedule = Literal["cosine", "trapezoid"]
SCHEDULES: Final[tuple[str, ...]] = get_args(Schedule)

FINAL_FRACTION: Final = 0.1
"""Where the cosine ends, as a fraction of the peak (Brown et al. 2020, appendix B)."""
COOLDOWN_FRACTION: Final = 0.2
"""Share of all steps that the trapezoid spends going down: enough to match a cosine (Hägele et al. 2024)."""


def learning_rate(step: int, *, schedule: Schedule, peak: float, steps: int, warmup_steps: int) -> float:
    """The rate that update number `step` (1 to `steps`) is made with.

    Both shapes rise linearly and reach `peak` at step `warmup_steps`, at the first step where that is 0. "cosine" then
    falls along half a cosine to a tenth of the peak at the last step (Loshchilov and Hutter 2017, equation 5, without
    restarts). "trapezoid" stays at the peak and falls linearly over the last fifth of the steps (Zhai et al. 2022,
    "Scaling Vision Transformers"; Hu et al. 2024, "MiniCPM"), aiming at zero one step after the last, so that no step
    is spent at a rate of zero.

    Raises:
        ValueError: `step` is not between 1 and `steps`.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step must be between 1 and {steps}, not {step}")
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "cosine":
        top = max(1, warmup_steps)
        progress = (step - top) / max(1, steps - top)
        return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))
    return peak * min(1.0, (steps + 1 - step) / cooldown_steps(steps, warmup_steps))


def cooldown_steps(steps: int, warmup_steps: int) -> int:
    """Steps of a trapezoid whose rate lies on the way down; a warm-up that reaches into that fifth shortens it."""
    return max(1, min(round(COOLDOWN_FRACTION * steps), steps - warmup_steps))


def steps_falling_after(step: int, *, warmup_steps: int) -> int:
    """The number of steps of the shortest trapezoid that is still at the peak at `step`, and falls from there on."""
    steps = max(step + 1, warmup_steps)
    if step > warmup_steps:  # then no warm-up shortens the way down, and all but its rounding is known
        steps = max(steps, int(step / (1 - COOLDOWN_FRACTION)) - 1)
    while steps - cooldown_steps(steps, warmup_steps) < step:
        steps += 1
    return steps


def same_past(step: int, *, schedule: Schedule, warmup_steps: int, old_steps: int, new_steps: int) -> bool:
    """Whether the first `step` updates have the same rates in a run of `old_steps` as in one of `new_steps`.

    True for a trapezoid that has not begun to go down in either: such a run can be made longer or shorter and still be,
    bit for bit, the run that had the new length from the start.
    """
    if step > new_steps:
        return False

    def rate(at: int, steps: int) -> float:
        return learning_rate(at, schedule=schedule, peak=1.0, steps=steps, warmup_steps=warmup_steps)

    return old_steps == new_steps or all(rate(at, old_steps) == rate(at, new_steps) for at in range(1, step + 1))
