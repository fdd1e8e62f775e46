"""What all benchmarks share: rounds in an order that drift cannot favour, medians and spreads, one last JSON line.

A benchmark measures each variant once per round, forwards in one round and backwards in the next (A B B A), after a
round of warm-up that is thrown away. Ratios compare values of one round and one run, never of two runs.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crucible.errors import CrucibleError
from crucible.hardware import cpu

UNRELIABLE_SPREAD: Final = 0.3
"""A row whose values differ by more than this share of their median says little: the machine did something else."""

Key = tuple[str, str]
"""Name and metric of a row."""

Samples = Mapping[Key, Sequence[float]]


class BenchError(CrucibleError):
    """A benchmark that cannot run, or whose work was not what it claims: the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number that was measured in every round.

    Attributes:
        name: the engine or variant.
        metric: what, with its setting: `decode@b16`, `prefill@1x512`, `ttft`.
        unit: of the values.
        values: one per round.
        ceiling: the most that this machine allows, by the probes of the same run, in the same unit; None where
            nothing simple bounds it.
    """

    name: str
    metric: str
    unit: str
    values: tuple[float, ...]
    ceiling: float | None = None

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest minus smallest value, as a share of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    @property
    def is_unreliable(self) -> bool:
        """Whether the spread is over `UNRELIABLE_SPREAD`."""
        return self.spread > UNRELIABLE_SPREAD

    def to_json(self) -> dict[str, Any]:
        """The row as the last line has it."""
        ceiling = None if self.ceiling is None else round(self.ceiling, 6)
        return {
            "name": self.name,
            "metric": self.metric,
            "unit": self.unit,
            "median": round(self.median, 6),
            "spread": round(self.spread, 4),
            "ceiling": ceiling,
            "unreliable": self.is_unreliable,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """A finished benchmark.

    Attributes:
        bench: its name.
        backend: what computed, or what was compared.
        model: what was computed.
        threads: threads used by each variant.
        rows: in the order to show.
        ratios: by `a/b:metric`, the median over rounds of a's value over b's.
        notes: sentences that a reader of the numbers needs.
        load: the machine's load average before and after, to tell a busy machine by.
        card: the graphics card, if that is what computed.
    """

    bench: str
    backend: str
    model: str
    threads: int
    rows: tuple[Row, ...]
    ratios: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    load: tuple[float, float] | None = None
    card: str | None = None

    @property
    def device(self) -> str:
        """The card that computed, or the processor and the threads used."""
        return self.card or f"{cpu().model}, {self.threads} thread{'s' * (self.threads > 1)}"

    def render(self) -> RenderableType:
        """Tables for `rich`."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        table.add_column("metric", no_wrap=True)
        for heading in ("median", "unit", "spread", "ceiling", "of it"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("")
        for row in self.rows:
            known = row.ceiling is not None and row.ceiling > 0
            table.add_row(
                row.name,
                row.metric,
                f"{row.median:,.4g}" if row.median < 100 else f"{row.median:,.0f}",
                row.unit,
                f"{row.spread:.1%}",
                f"{row.ceiling:,.4g}" if known else "",
                f"{row.median / row.ceiling:.0%}" if known and row.ceiling else "",
                "unreliable" if row.is_unreliable else "",
            )
        load = "" if self.load is None else f"; load average {self.load[0]:.1f} before, {self.load[1]:.1f} after"
        lines = [f"{self.bench}: {self.model}, {self.backend}, {self.device}{load}"]
        lines_after = [f"{name}  {value:.3f}" for name, value in self.ratios.items()]
        return Group(Text(lines[0]), table, *(Text(line) for line in (*lines_after, *self.notes)))

    def to_json(self) -> str:
        """The last line of standard output: one JSON object."""
        values = {
            "bench": self.bench,
            "device": self.device,
            "backend": self.backend,
            "model": self.model,
            "rows": [row.to_json() for row in self.rows],
            "ratios": {name: round(value, 6) for name, value in self.ratios.items()},
            "load_average": None if self.load is None else list(self.load),
            "notes": list(self.notes),
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False)


def interleave(
    variants: Mapping[str, Callable[[], Mapping[Key, float]]],
    rounds: int,
    *,
    warm_up: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[Key, tuple[float, ...]]:
    """Measure every variant once per round, in turn, the order reversed every second round.

    Args:
        variants: functions that measure once and give a value per row; each must give the same keys every time.
        rounds: rounds that count.
        warm_up: rounds before them that do not.
        on_round: called with the rounds done, warm-up included, and their number.

    Returns:
        The values by row, in the order of `variants`; value i of every row is of round i.

    Raises:
        BenchError: no rounds, or a variant gave other rows than before.
    """
    if rounds < 1:
        raise BenchError(f"the number of rounds must be at least 1, not {rounds}")
    samples: dict[Key, list[float]] = {}
    for number in range(warm_up + rounds):
        order = reversed(list(variants)) if number % 2 else variants
        found = {name: variants[name]() for name in order}
        measured = {key: value for name in variants for key, value in found[name].items()}
        if number == warm_up:
            samples = {key: [] for key in measured}
        if number >= warm_up:
            if measured.keys() != samples.keys():
                raise BenchError(f"a round measured {sorted(measured)}, an earlier one {sorted(samples)}")
            for key, value in measured.items():
                samples[key].append(value)
        if on_round is not None:
            on_round(number + 1, warm_up + rounds)
    return {key: tuple(values) for key, values in samples.items()}


def ratio(samples: Samples, numerator: Key, denominator: Key) -> float:
    """The median over rounds of one row's value over another's in the same round."""
    pairs = zip(samples[numerator], samples[denominator], strict=True)
    return statistics.median(above / below for above, below in pairs)


def load_average() -> float:
    """Processes that ran or waited for a processor, averaged over the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0
