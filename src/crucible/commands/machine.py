"""This machine: what it has, and what models do on it."""

from __future__ import annotations

import typer

from crucible.commands import bench, examples

app = typer.Typer()
PANEL = "This machine"


@app.command(rich_help_panel=PANEL, epilog=examples("crucible doctor"))
def doctor() -> None:
    """Check what this machine has and lacks, with a remedy for each lack."""
    from crucible.doctor import exit_code, render, run_checks

    checks = run_checks()
    render(checks)
    raise typer.Exit(exit_code(checks))


app.add_typer(bench.app, name="bench", rich_help_panel=PANEL)
