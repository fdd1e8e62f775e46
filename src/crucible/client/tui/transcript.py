"""The conversation, as lines that are made once and drawn as often as they are scrolled past."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Sequence
from typing import Final

from rich.segment import Segment
from rich.style import Style
from textual.events import MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.message import Message
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from crucible.client.store import Turn
from crucible.client.tui.markdown import Block, printable

_BARS: Final = {"user": " ▌ ", "assistant": "   "}
_MARGIN: Final = re.compile("^(" + "|".join(_BARS.values()) + ")", re.MULTILINE)
_COLORS: Final = {"user": "#6fc3df", "assistant": "#e6a35c"}
_DIM: Final = Style(dim=True, italic=True)
_WHEEL_LINES: Final = 3
_WELCOME: Final = """
Type below and press Enter.

F1 lists all keys, F3 sets how replies are generated, F4 opens earlier conversations."""


class Transcript(Widget):
    """Shows turns; the last one may grow. The newest text stays in view until somebody scrolls up.

    It scrolls by itself: Textual's scrolling views lay out the whole screen for every line that is added.
    """

    DEFAULT_CSS = "Transcript { height: 1fr; }"

    class Scrolled(Message):
        """So many lines are below what is in view."""

        def __init__(self, lines_below: int) -> None:
            super().__init__()
            self.lines_below = lines_below

    def __init__(self) -> None:
        super().__init__()
        self._turns: Sequence[Turn] = ()
        self._model = ""
        self._base = Style()
        self._strips: list[Strip] = []
        self._made: list[tuple[Hashable, int]] = []
        """Of each turn: what its lines were made of, and the first of them."""
        self._last: Block | None = None
        self._last_start = 0
        """The first line of the last turn's text."""
        self._top: int | None = None
        """The first line in view; None while the end is."""

    def show(self, turns: Sequence[Turn], model: str) -> None:
        """Show a conversation, wherever it was scrolled to."""
        self._turns, self._model, self._base = turns, model, self.rich_style
        contents = [(turn.role, turn.text, turn.note, model, self.size.width) for turn in turns]
        same = zip(contents[:-1], self._made, strict=False)
        kept = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1][0], same))
        if kept < len(self._made) or not kept:
            del self._strips[self._made[kept][1] if kept else 0 :]
        del self._made[kept:]
        if not turns:
            self._append(self._block(_DIM).lines(_WELCOME)[0], "assistant")
        for turn, content in zip(turns[kept:], contents[kept:], strict=True):
            self._made.append((content, len(self._strips)))
            self._add(turn)
        self._moved()

    def _add(self, turn: Turn) -> None:
        name = "You" if turn.role == "user" else printable(self._model) or "Model"
        self._append(self._block(Style(bold=True, color=_COLORS[turn.role])).lines(name)[0], turn.role)
        self._last = self._block(Style(), is_markdown=turn.role == "assistant")
        self._last_start = len(self._strips)
        self._append(self._last.lines(turn.text)[0], turn.role)
        if turn.note:
            self._append(self._block(_DIM).lines(f"─ {turn.note}")[0], turn.role)
        self._append([Strip.blank(self._width, self._base)], "assistant")

    def grow(self) -> None:
        """The last turn has more text than before."""
        if self._last is None:
            return
        top = self.top
        lines, kept = self._last.lines(self._turns[-1].text)
        start = self._last_start + kept
        del self._strips[start:]
        self._append(lines[kept:], "assistant")
        if self.top == top:
            self.refresh(Region(0, max(0, start - top), self.size.width, self.size.height))
        else:
            self._moved()

    def scroll_lines(self, lines: int) -> None:
        """Show what is so many lines further down."""
        top = max(0, self.top + lines)
        self._top = top if top < self._max_top else None
        self._moved()

    def to_end(self) -> None:
        """Bring the newest text into view, and keep it there."""
        self._top = None
        self._moved()

    @property
    def is_at_end(self) -> bool:
        return self._top is None or self._top >= self._max_top

    @property
    def top(self) -> int:
        """The first line in view."""
        return self._max_top if self._top is None else min(self._top, self._max_top)

    @property
    def _max_top(self) -> int:
        return max(0, len(self._strips) - self.size.height)

    @property
    def _width(self) -> int:
        """Of a turn's text."""
        return max(1, self.size.width - 2 * len(_BARS["user"]) + 1)

    def _block(self, style: Style, *, is_markdown: bool = False) -> Block:
        return Block(self.app.console, self._base + style, self._width, is_markdown=is_markdown)

    def _append(self, lines: Sequence[Strip], role: str) -> None:
        bar = Segment(_BARS[role], self._base + Style(color=_COLORS[role]))
        rest = Segment("  ", self._base)
        for line in lines:
            strip = Strip([bar, *line, rest], self.size.width)
            self._strips.append(strip.apply_offsets(0, len(self._strips)))

    def _moved(self) -> None:
        self.refresh()
        self.post_message(self.Scrolled(0 if self.is_at_end else self._max_top - self.top))

    def on_resize(self, event: Resize) -> None:
        """Lines are made anew for another width."""
        self.show(self._turns, self._model)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.scroll_lines(-_WHEEL_LINES)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.scroll_lines(_WHEEL_LINES)

    # ---- lines and selections -------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """As Textual's line API."""
        line = self.top + y
        if line >= len(self._strips):
            return Strip.blank(self.size.width, self._base)
        strip = self._strips[line]
        if (selection := self.text_selection) and (span := selection.get_span(line)):
            strip = _highlighted(strip, *span).apply_offsets(0, line)
        return strip

    @property
    def allow_select(self) -> bool:
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """As `Widget.get_selection`; without the margin."""
        text = selection.extract("\n".join(strip.text.rstrip() for strip in self._strips))
        return _MARGIN.sub("", text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """As `Widget.selection_updated`."""
        self.refresh()


def _highlighted(strip: Strip, start: int, end: int) -> Strip:
    end = strip.cell_length if end == -1 else min(end, strip.cell_length)
    before, inside, after = strip.crop(0, start), strip.crop(start, end), strip.crop(end)
    reverse = Style(reverse=True)
    return Strip.join([before, Strip([Segment(s.text, (s.style or Style()) + reverse) for s in inside]), after])
