"""Replacing files and links so that a kill or a power cut at any moment leaves the old one or the new one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from crucible.data.shards import sync_folder, write_file


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
