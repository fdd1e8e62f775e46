"""Stop strings: found in a text that comes in pieces, wherever the pieces are cut.

stops = StopMatcher(["User:", "System:"])
for piece in pieces:
    print(stops.push(piece), end="")
    if stops.matched is not None:
        break
print(stops.flush())
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from crucible.errors import CrucibleError

MAX_STOPS: Final = 32
"""Stop strings of one request."""

MAX_STOP_LENGTH: Final = 512
"""Characters of one stop string."""


class StopError(CrucibleError):
    """Stop strings that cannot be matched: the message says which and what is allowed."""


def checked_stops(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple, from one string, a list or tuple of strings, or None for none.

    Raises:
        StopError: another type; an empty string, which every text has; more than MAX_STOPS strings, or one of more
            than MAX_STOP_LENGTH characters.
    """
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)):
        raise StopError(f"stop must be a string or a list of strings, not {stop!r:.60}")
    if len(stops) > MAX_STOPS:
        raise StopError(f"stop takes at most {MAX_STOPS} strings, not {len(stops)}")
    for index, text in enumerate(stops):
        name = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not isinstance(text, str):
            raise StopError(f"{name} must be a string, not {text!r:.60}")
        if not text:
            raise StopError(f"{name} is empty; a stop string needs at least one character")
        if len(text) > MAX_STOP_LENGTH:
            raise StopError(f"{name} has {len(text)} characters; {MAX_STOP_LENGTH} are allowed")
    return tuple(stops)


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop string, `depth` characters long.

    `fallback` is the longest proper suffix of it that is such a prefix too, None for the empty one; `stop` the
    longest stop string that it ends with.
    """

    depth: int = 0
    fallback: _Node | None = None
    stop: str | None = None
    children: dict[str, _Node] = field(default_factory=dict)


class StopMatcher:
    """Passes a text on, up to the first of its stop strings.

    The text ends as soon as it holds a stop string: the one that is complete first and, of several that end with the
    same character, the longest, so that nothing of any is left. Only what could still become a stop string is held
    back. Neither depends on where the text is cut into pieces.

    The automaton of Aho and Corasick (1975, "Efficient string matching", section 3): time in proportion to the text
    and the stop strings, however many there are and however they overlap. A piece costs its own length, and that of
    the text held before it.

    Raises:
        StopError: as `checked_stops`.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._root = _automaton(checked_stops(list(stops)))
        self._node = self._root
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, once there is one."""

    def push(self, text: str) -> str:
        """The text that became certain with this piece; "" from the stop string on."""
        if self.matched is not None:
            return ""
        text = self._held + text
        for index in range(len(self._held), len(text)):
            self._node = _next(self._node, text[index])
            if self._node.stop is not None:
                self.matched, self._held = self._node.stop, ""
                return text[: index + 1 - len(self.matched)]
        certain = len(text) - self._node.depth
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Ends the text: what was held back, as it became no stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _automaton(stops: Iterable[str]) -> _Node:
    """The prefixes of all stops as a tree from the empty one, with their fallbacks."""
    root = _Node()
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for character, child in node.children.items():
            # Shorter prefixes, and so the fallback's own, are done before longer ones.
            child.fallback = root if node.fallback is None else _next(node.fallback, character)
            child.stop = child.stop or child.fallback.stop
            waiting.append(child)
    return root


def _next(node: _Node, character: str) -> _Node:
    """The longest prefix of a stop that the text ends with, after one more character."""
    while (child := node.children.get(character)) is None:
        if node.fallback is None:
            return node
        node = node.fallback
    return child
