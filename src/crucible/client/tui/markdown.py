"""Text of a model to lines of a terminal, block by block, so that a long reply costs no more to extend than a short."""

from __future__ import annotations

from typing import ClassVar, Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import Heading, Markdown, MarkdownElement
from rich.style import Style
from rich.text import Text
from rich.theme import Theme
from textual.strip import Strip

THEME: Final = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.code": "bold #e6c384",
        "markdown.code_block": "#d7d7d7",
        "markdown.block_quote": "italic #9fb4cc",
        "markdown.item.bullet": "bold #6fc3df",
        "markdown.item.number": "bold #6fc3df",
        "markdown.hr": "#5c6773",
        "markdown.link": "underline #6fc3df",
        "markdown.link_url": "underline #6fc3df",
    }
)
_CODE_THEME: Final = "one-dark"
# Raw HTML would not be shown at all.
_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
_CONTROL: Final = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in b"\t\n"}


def printable(text: str) -> str:
    """With nothing in it that a terminal could take as a command."""
    return text.translate(_CONTROL)


class Block:
    """Text that grows, as lines of one width.

    What is rendered again is the last block of its Markdown, the only one that more text can change.

    Args:
        is_markdown: otherwise the text is shown as it is.
    """

    def __init__(self, console: Console, style: Style, width: int, *, is_markdown: bool) -> None:
        self._console = console
        self._style = style
        self._options = console.options.update(width=max(1, width), height=None, highlight=False)
        self._is_markdown = is_markdown
        self._done: list[Strip] = []
        self._position = 0
        """Where in the text the last block begins."""

    def lines(self, text: str) -> tuple[list[Strip], int]:
        """All lines of a text that began as the last one did; and how many of them are as they were before."""
        if not self._is_markdown:
            return self._strips(Text(printable(text))), 0
        kept = len(self._done)
        tail = printable(text[self._position :])
        *finished, last = _blocks(tail)
        for _, tokens in finished:
            self._done += [*self._strips(_MARKDOWN.of(tokens)), Strip.blank(self._options.max_width, self._style)]
        line, tokens = last
        self._position += _offset(tail, line)
        return self._done + self._strips(_MARKDOWN.of(tokens)), kept

    def _strips(self, renderable: RenderableType) -> list[Strip]:
        lines = self._console.render_lines(renderable, self._options, style=self._style)
        strips = [Strip(line, self._options.max_width) for line in lines]
        while strips and self._is_blank(strips[-1]):
            strips.pop()
        first = next((i for i, strip in enumerate(strips) if not self._is_blank(strip)), 0)
        return strips[first:]

    def _is_blank(self, strip: Strip) -> bool:
        """Nothing is on it, not even a background."""
        styles = [segment.style for segment in strip if segment.style]
        return not strip.text.strip() and all(style.bgcolor == self._style.bgcolor for style in styles)


def _blocks(text: str) -> list[tuple[int, list[Token]]]:
    """Blocks of Markdown: the line that each begins on, and its tokens. At least one.

    Line ends stay line ends: models mean them, unlike people who wrap their source.
    """
    blocks: list[tuple[int, list[Token]]] = []
    for token in _PARSER.parse(text):
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        if token.level == 0 and token.nesting >= 0:
            blocks.append((token.map[0] if token.map else 0, []))
        blocks[-1][1].append(token)
    return blocks or [(0, [])]


def _offset(text: str, line: int) -> int:
    position = 0
    for _ in range(line):
        position = text.index("\n", position) + 1
    return position


class _Heading(Heading):
    """On the left and without a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "heading_open": _Heading}

    def of(self, tokens: list[Token]) -> _Markdown:
        """Itself, for a moment with these tokens: making another one costs more than rendering a line."""
        self.parsed = tokens
        return self


_MARKDOWN: Final = _Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
