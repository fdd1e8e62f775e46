"""The conversation, as lines that are made once and drawn as often as they are scrolled past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.events import Resize
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from crucible.client.store import Turn
from crucible.client.tui.markdown import Block, printable

_MARGIN: Final = 2
_BAR: Final = "▌ "
_WELCOME: Final = """\
Type below and press Enter.

F1 lists all keys, F3 sets how replies are generated, F4 opens earlier conversations."""


class Transcript(ScrollView, can_focus=False):
    """Shows turns; the last one may grow. The newest text stays in view until somebody scrolls up."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; padding: 0 0 0 1; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns: Sequence[Turn] = ()
        self._model = ""
        self._is_growing = False
        self._follows = True
        self._strips: list[Strip] = []
        self._last_start = 0
        """The first line of the last turn's text."""
        self._last: Block | None = None

    @property
    def is_at_end(self) -> bool:
        return self.scroll_offset.y >= self.max_scroll_y

    def show(self, turns: Sequence[Turn], name: str, *, is_growing: bool = False) -> None:
        """Show a conversation.

        Args:
            name: of the model.
            is_growing: more will come to the last turn, told by `grow`.
        """
        self._turns, self._model, self._is_growing = turns, name, is_growing
        self._strips, self._last = [], None
        if not turns and self._width:
            block = Block(self.app.console, self.rich_style + Style(dim=True), self._width, is_markdown=False)
            self._strips = block.lines(_WELCOME)[0]
        for turn in turns if self._width else ():
            self._add(turn, is_whole=not (is_growing and turn is turns[-1]))
        self._resized(0)

    def grow(self) -> None:
        """The last turn has more text than before."""
        if self._last is None:
            return
        lines, kept = self._last.lines(self._turns[-1].text)
        start = self._last_start + kept
        self._strips[start:] = self._indented(lines[kept:], self._turns[-1])
        self._resized(start)

    def to_end(self) -> None:
        """Bring the newest text into view, and keep it there."""
        self.scroll_end(animate=False, immediate=True)

    def _add(self, turn: Turn, *, is_whole: bool) -> None:
        is_user = turn.role == "user"
        name = Text("You" if is_user else printable(self._model) or "Model", Style(bold=True, color=_color(turn)))
        title = self.app.console.render_lines(name, self.app.console.options.update(width=self._width))
        self._strips += self._indented([Strip(line, self._width) for line in title], turn)
        self._last_start = len(self._strips)
        self._last = Block(self.app.console, self.rich_style, self._width, is_markdown=not is_user)
        self._strips += self._indented(self._last.lines(turn.text)[0], turn)
        if turn.note:
            block = Block(
                self.app.console, self.rich_style + Style(dim=True, italic=True), self._width, is_markdown=False
            )
            self._strips += self._indented(block.lines(f"─ {turn.note}")[0], turn)
        if is_whole:
            self._strips.append(Strip.blank(self._width + _MARGIN, self.rich_style))

    def _indented(self, lines: Sequence[Strip], turn: Turn) -> list[Strip]:
        bar = _BAR if turn.role == "user" else " " * _MARGIN
        segment = Segment(bar, self.rich_style + Style(color=_color(turn)))
        return [Strip([segment, *line], self._width + _MARGIN).apply_style(self.rich_style) for line in lines]

    @property
    def _width(self) -> int:
        """Of a turn's text."""
        return max(0, self.scrollable_content_region.width - _MARGIN - 1)

    def _resized(self, first_changed: int) -> None:
        size = Size(self._width + _MARGIN, len(self._strips))
        if size != self.virtual_size:
            self.virtual_size = size
        if self._follows:
            self.to_end()
        self.refresh_lines(first_changed, max(self.size.height, len(self._strips) - first_changed))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Whoever scrolls away from the end wants to read there."""
        super().watch_scroll_y(old_value, new_value)
        self._follows = new_value >= self.max_scroll_y

    def on_resize(self, event: Resize) -> None:
        """Lines are made anew for another width."""
        self.show(self._turns, self._model, is_growing=self._is_growing)

    # ---- lines and selections -------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        """As Textual's line API."""
        line = y + self.scroll_offset.y
        width = self.size.width
        if line >= len(self._strips):
            return Strip.blank(width, self.rich_style)
        strip = self._strips[line]
        if (selection := self.text_selection) and (span := selection.get_span(line)):
            strip = _highlighted(strip, *span)
        return strip.crop_extend(0, width, self.rich_style).apply_offsets(0, line)

    @property
    def allow_select(self) -> bool:
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """As `Widget.get_selection`."""
        return selection.extract("\n".join(strip.text.rstrip() for strip in self._strips)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """As `Widget.selection_updated`."""
        self.refresh()


def _color(turn: Turn) -> str:
    return "#6fc3df" if turn.role == "user" else "#e6a35c"


def _highlighted(strip: Strip, start: int, end: int) -> Strip:
    end = strip.cell_length if end == -1 else min(end, strip.cell_length)
    reverse = Style(reverse=True)
    before, inside, after = strip.crop(0, start), strip.crop(start, end), strip.crop(end)
    return Strip.join([before, Strip([Segment(s.text, (s.style or Style()) + reverse) for s in inside]), after])
