"""The one base class of errors that a user's input can cause, and how they say what to install."""

from __future__ import annotations


class CrucibleError(ValueError):
    """Bad input: the message is one line that names the field or file and says what is allowed.

    The command line prints it without a traceback; a program can catch it as a ValueError.
    """


def install(extra: str) -> str:
    """What installs an extra. Not by name alone: on PyPI that name is another project's."""
    return f"pip install --editable '.[{extra}]' in the checkout"
