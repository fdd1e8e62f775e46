"""What a client sees of one request's speed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

_GAPS: Final = 1024


class Speed:
    """Of one request, from when it is made. Seconds, of one clock."""

    def __init__(self) -> None:
        self.tokens = 0
        self._began = time.perf_counter()
        self._first = self._last = self._began
        self._gaps: deque[float] = deque(maxlen=_GAPS)

    def add(self, times: Sequence[float]) -> None:
        """Tokens came at these times; those that came at once share what they took."""
        for when, group in itertools.groupby(times):
            tokens = len(list(group))
            if not self.tokens:
                self._first = when
            else:
                self._gaps.extend([(when - self._last) / tokens] * tokens)
            self._last = when
            self.tokens += tokens

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token; None before it."""
        return self._first - self._began if self.tokens else None

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first one; None before the second."""
        return (self.tokens - 1) / (self._last - self._first) if self._last > self._first else None

    @property
    def gap(self) -> float | None:
        """Median of the seconds between tokens, the last thousand of them; None before the second."""
        return statistics.median(self._gaps) if self._gaps else None
