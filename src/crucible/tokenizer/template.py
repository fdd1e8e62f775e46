"""Chat templates: Jinja, sandboxed, with a record of which characters the template itself wrote.

A template writes control tokens around what users say, and users can say `<|im_end|>` too. The two must not be
confused, and no marker put into the content keeps them apart without changing what the template sees: templates trim
contents, search them and cut them up. So contents are rendered as they are, as plain strings, and it is the
template's own text that is marked: every literal of it becomes a `Written`, a string that keeps for each character
whether the template wrote it, through concatenation, trimming, slicing, joining and the like. Whatever else a template
does to a string loses the record and so counts as content. A mistake of this kind can spoil a prompt; it never
makes a control token of something that a user said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn, SupportsIndex

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

from crucible.errors import CrucibleError


class TemplateError(CrucibleError):
    """A chat template that is malformed, or that refuses the conversation: the message is the template's own."""


class Written(str):
    """A string of which the template wrote those characters whose byte in `by_template` is 1.

    It equals and hashes as the plain string. Methods that are not overridden here return plain strings.
    """

    __slots__ = ("by_template",)

    by_template: bytes

    def __new__(cls, text: str, by_template: bytes | None = None) -> Written:
        """By default no character counts as the template's: Jinja's sandbox makes strings of this type so."""
        self = super().__new__(cls, text)
        self.by_template = bytes(len(self)) if by_template is None else by_template
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Written:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Written:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> Written:
        at = key if isinstance(key, slice) else slice(key, int(key) + 1 or None)
        return Written(super().__getitem__(key), self.by_template[at])

    def strip(self, chars: str | None = None, /) -> Written:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Written:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Written:
        return self[: len(super().rstrip(chars))]

    def join(self, parts: Iterable[str], /) -> Written:
        between: list[str] = []
        for part in parts:
            between += (self, part)
        return concat(between[1:])

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return super().split(sep, maxsplit)
        parts, start = [], 0
        for part in super().split(sep, maxsplit):
            parts.append(self[start : start + len(part)])
            start += len(part) + len(sep)
        return list(parts)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        return Written.join(Written(new, _by_template(new)), self.split(old, count))


def written(text: str) -> Written:
    """Text that the template wrote."""
    return Written(text, b"\1" * len(text))


def concat(parts: Iterable[str]) -> Written:
    """The strings joined, each with its record."""
    parts = list(parts)
    return Written("".join(parts), b"".join(map(_by_template, parts)))


def _is_written(value: Any) -> bool:
    return isinstance(value, Written) and all(value.by_template)


def _by_template(text: str) -> bytes:
    return text.by_template if isinstance(text, Written) else bytes(len(text))


class Template:
    """A chat template, compiled.

    Raises:
        TemplateError: it is not well formed.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            self._compiled = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:  # the latter two where it nests too deep
            raise TemplateError(f"the chat template is malformed: {error}") from None
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.names = frozenset(constants | {node.attr for node in tree.find_all(nodes.Getattr)})
        """Strings and attributes that the template names: the roles and fields of messages that it knows are among
        them."""

    def render(self, variables: Mapping[str, Any]) -> Written:
        """The text for these variables: plain data, and `Written` for what shall count as the template's own.

        Raises:
            TemplateError: the template raises an exception, or cannot handle the variables.
        """
        try:
            return concat([self._compiled.render(variables)])
        except _Raised as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from None
        except _FAILURES as error:
            raise TemplateError(f"the chat template fails on these messages: {error}") from None


class _Raised(jinja2.TemplateError):
    """By the template, with `raise_exception`."""


_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the expressions of a template can raise."""


class _CodeGenerator(CodeGenerator):
    """Wraps each string literal of a template in `written`."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(f"environment.written({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({''.join(group)!r})"

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat = staticmethod(concat)
    written = staticmethod(written)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `format` of a string, the template's where nothing else goes into it."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        def format(*args: Any, **kwargs: Any) -> str:
            text = sandboxed(*args, **kwargs)
            return written(text) if all(map(_is_written, (value.__self__, *args, *kwargs.values()))) else text

        return format


class _Generation(Extension):
    """`{% generation %}` marks what assistants said, for training; here it is no more than what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    """Jinja as `transformers` sets it up for chat templates, but for the record."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        optimized=False,  # it would fold lists of literals into one constant
    )
    environment.filters |= {"tojson": _tojson, "join": _join}
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's own, on a separator that keeps the record."""
    joined: str = FILTERS["join"](context, value, concat([str(d)]), attribute)
    return joined


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
