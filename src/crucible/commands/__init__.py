"""The commands, a module for each part of the path. They read options and print; the work is in the packages.

Anything heavy is imported inside the command that needs it, so that `crucible --help` answers at once.
"""

from __future__ import annotations


def examples(*commands: str) -> str:
    """The last paragraphs of a command's help."""
    # A blank line between them: typer joins the lines of a paragraph.
    return "\n\n".join(("Examples:" if len(commands) > 1 else "Example:", *(f"  {command}" for command in commands)))
