"""Replacing files and links so that a kill or a power cut at any moment leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def partial_path(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(f".{path.name}.partial")


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file by one rename, its bytes on disk before that; a failure leaves the old one. Raises OSError."""
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file by one rename, its bytes on disk before that. Raises OSError."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def replace_link(link: Path, target: str) -> None:
    """Points a symbolic link at `target`, relative to the link's folder, by one rename. Raises OSError."""
    temporary = link.with_name(f".tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync_folder(link.parent)


def sync_file(path: Path) -> None:
    """Waits until the bytes of a file that others wrote are on disk. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
