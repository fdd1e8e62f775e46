"""Print the polynomials of the sampler's exp and log: `python scripts/fit_polynomials.py` (needs mpmath).

Each is the minimax polynomial of a smooth remainder, found by Remez exchange in 200 bits, then rounded to float64
coefficient by coefficient. docs/sampling.md quotes them, src/crucible/engine/numerics.py holds them, a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mpmath
from mpmath import mp, mpf

PRECISION_BITS = 200
EXP_DEGREE, LOG_DEGREE = 10, 6
LN2_HIGH_BITS = 42
GRID_PER_EXTREMUM = 20
EQUAL = mpf(2) ** -60
"""Relative difference up to which extrema count as equal: below what rounding to float64 could show."""
TERNARY_STEPS = 120


def exp_remainder(r: mpf) -> mpf:
    """(e^r - 1 - r) / r^2, whose polynomial is Q."""
    if abs(r) < mpf(2) ** -60:
        return mpf(1) / 2 + r / 6 + r**2 / 24
    return (mpmath.exp(r) - 1 - r) / r**2


def log_remainder(z: mpf) -> mpf:
    """(2 atanh(s) - 2s) / s^3 with s = sqrt(z), whose polynomial is R."""
    if z < mpf(2) ** -60:
        return mpf(2) / 3 + 2 * z / 5 + 2 * z**2 / 7
    s = mpmath.sqrt(z)
    return (2 * mpmath.atanh(s) - 2 * s) / s**3


def remez(function: Callable[[mpf], mpf], low: mpf, high: mpf, degree: int) -> list[mpf]:
    """Coefficients, lowest degree first, of the polynomial with the least maximal error on [low, high].

    Remez (1934): solve for a polynomial whose error has one size and alternating sign at degree + 2 points, move the
    points to the extrema of its error, repeat until the extrema are equal.
    """
    points = _chebyshev_points(low, high, degree + 2)
    for _ in range(20):
        rows = [[*(x**power for power in range(degree + 1)), mpf(-1) ** i] for i, x in enumerate(points)]
        solution = mp.lu_solve(mp.matrix(rows), mp.matrix([function(x) for x in points]))
        coefficients = list(solution)[: degree + 1]

        def error(x: mpf, coefficients: Sequence[mpf] = coefficients) -> mpf:
            return mpmath.polyval(coefficients[::-1], x) - function(x)

        points = _extrema(error, low, high, degree + 2)
        sizes = [abs(error(x)) for x in points]
        if max(sizes) - min(sizes) < EQUAL * max(sizes):
            return coefficients
    raise ArithmeticError("Remez exchange does not converge")


def _chebyshev_points(low: mpf, high: mpf, count: int) -> list[mpf]:
    """Extrema of the Chebyshev polynomial, from low to high, both ends included."""
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mpmath.cos(mpmath.pi * k / (count - 1)) for k in range(count)]


def _extrema(error: Callable[[mpf], mpf], low: mpf, high: mpf, count: int) -> list[mpf]:
    """The point of largest error in each run of one sign: the two ends and a peak of each run between them."""
    grid = _chebyshev_points(low, high, GRID_PER_EXTREMUM * count)
    errors = [error(x) for x in grid]
    runs: list[list[int]] = []
    for i, value in enumerate(errors):
        if not runs or (errors[i - 1] > 0) != (value > 0):
            runs.append([])
        runs[-1].append(i)
    if len(runs) != count:
        raise ArithmeticError(f"the error changes sign {len(runs) - 1} times, not {count - 1}")
    highest = [max(run, key=lambda i: abs(errors[i])) for run in runs[1:-1]]
    return [low, *(_peak(error, grid[i - 1], grid[i + 1]) for i in highest), high]


def _peak(error: Callable[[mpf], mpf], left: mpf, right: mpf) -> mpf:
    """Where |error| is largest between two points around a single maximum of it: ternary search."""
    for _ in range(TERNARY_STEPS):
        third = (right - left) / 3
        if abs(error(left + third)) < abs(error(right - third)):
            left += third
        else:
            right -= third
    return (left + right) / 2


def fit() -> dict[str, list[float]]:
    """Every constant by its name in numerics.py, rounded to float64."""
    with mp.workprec(PRECISION_BITS):
        ln2 = mpmath.log(2)
        ln2_high = mpmath.floor(ln2 * 2**LN2_HIGH_BITS) / 2**LN2_HIGH_BITS
        largest_z = (3 - 2 * mpmath.sqrt(2)) ** 2
        constants = {
            "LOG2_E": [1 / ln2],
            "LN2_HIGH": [ln2_high],
            "LN2_LOW": [ln2 - ln2_high],
            "EXP_Q": remez(exp_remainder, -ln2 / 2, ln2 / 2, EXP_DEGREE),
            "LOG_R": remez(log_remainder, mpf(0), largest_z, LOG_DEGREE),
        }
        return {name: [float(value) for value in values] for name, values in constants.items()}


if __name__ == "__main__":
    for name, values in fit().items():
        print(name, *(value.hex() for value in values), sep="\n    ")
