"""One line about the server, and the panel of figures."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text
from textual.widget import Widget

from crucible.client.link import Link, State
from crucible.client.measure import Speed
from crucible.client.store import Conversation
from crucible.client.tui.markdown import printable

_SIGNS: Final[dict[State, tuple[str, str]]] = {
    "connecting": ("○", "yellow"),
    "connected": ("●", "green"),
    "reconnecting": ("○", "yellow"),
    "disconnected": ("×", "red"),
}
_NONE: Final = "–"


class Header(Widget):
    """State of the connection, model, how replies are generated, and how busy the service is."""

    DEFAULT_CSS = "Header { height: 1; background: $panel; padding: 0 1; }"

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.conversation = Conversation()

    def render(self) -> Text:
        """As `Widget.render`."""
        link = self._link
        sign, color = _SIGNS[link.state]
        parts = [
            Text("Crucible", "bold"),
            Text.assemble((sign, color), f" {link.state}"),
            Text(printable((link.health and link.health.model) or self.conversation.model), "bold"),
        ]
        if link.state != "connected" and link.reason:
            parts.append(Text(printable(link.reason), color))
        else:
            parts.append(Text(self.conversation.settings.summary()))
            if link.health is not None and link.metrics is not None:
                busy = link.metrics.active + link.metrics.prefilling
                parts.append(Text(f"serving {busy} of {link.health.max_batch}"))
        text = Text("   ").join(part for part in parts if part.plain)
        text.truncate(self.size.width, overflow="ellipsis")
        text.no_wrap = True
        return text


class Figures(Widget):
    """Names and values below each other."""

    DEFAULT_CSS = "Figures { height: 6; width: 1fr; border: round $foreground 40%; padding: 0 1; }"

    def rows(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def render(self) -> Table:
        """As `Widget.render`."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        for name, value in self.rows():
            table.add_row(Text(name, "dim"), Text(value, "bold"))
        return table


class RequestFigures(Figures):
    """The last request as the client sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = Speed()
        self.border_title = "this request, seen from here"

    def rows(self) -> list[tuple[str, str]]:
        """As `Figures.rows`."""
        speed = self.speed
        return [
            ("first token", _milliseconds(speed.first_token)),
            ("tokens a second", f"{speed.rate:,.1f}" if speed.rate else _NONE),
            ("gap, median", _milliseconds(speed.gap)),
            ("tokens", f"{speed.tokens:,}"),
        ]


class ServiceFigures(Figures):
    """The service as it sees itself."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self.border_title = "service"

    def rows(self) -> list[tuple[str, str]]:
        """As `Figures.rows`."""
        names = ("active · queued", "KV pages", "batch last · mean", "tokens · uptime")
        if (metrics := self._link.metrics) is None:
            return [(name, _NONE) for name in names]
        values = (
            f"{metrics.active + metrics.prefilling} · {metrics.queued}",
            f"{metrics.pages.used:,} of {metrics.pages.total:,}",
            f"{metrics.batch.last} · {metrics.batch.mean:.2f}",
            f"{metrics.tokens.generated:,} · {_duration(metrics.uptime)}",
        )
        return list(zip(names, values, strict=True))


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _NONE
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
