"""The arguments that decide a prepared folder's bytes, and what an earlier run with them left in it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crucible.data.shards import MAX_SHARD_TOKENS, DataError
from crucible.files import write_file
from crucible.tokenizer import parse_train_spec

META: Final = "meta.json"
"""Written last: a folder that has it is finished."""
PROGRESS: Final = "progress.json"
"""Where an unfinished run goes on from."""
TOKENIZER: Final = "tokenizer.json"

Notes = dict[str, Any]
"""The content of either."""

_RANGES: Final = {
    "val_fraction": (0, 0.99),
    "limit_tokens": (1, 2**63 - 1),
    "shard_tokens": (2, MAX_SHARD_TOKENS),
    "seed": (0, 2**64 - 1),
}
_OURS = re.compile(r"\.?(meta\.json|progress\.json|tokenizer\.json|(train|val)_\d{6}\.bin)(\.partial)?")
_START_ANEW: Final = "choose another folder, or start anew with --force"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What `prepare` is asked for, but for how it gets there (workers, progress).

    Raises:
        DataError: a field is out of range; the message names it.
        TokenizerError: the tokenizer is `train:N` with an N that is no vocabulary size.
    """

    sources: tuple[str, ...]
    tokenizer: str
    val_fraction: float
    limit_tokens: int | None
    shard_tokens: int
    text_field: str
    seed: int

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("no sources: give files, folders, globs, hf:OWNER/NAME or demo")
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise DataError(f"{name} must be from {lowest} to {highest}, not {value}")
        parse_train_spec(self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ready for JSON."""
        return dataclasses.asdict(self) | {"sources": list(self.sources)}


def find_earlier(folder: Path, recipe: Recipe) -> Notes | None:
    """What an earlier call noted in a folder: meta.json, or where it did not finish progress.json with its cursor.

    A call that got nowhere is cleared away, so as not to be in the way of one with better arguments.

    Raises:
        DataError: the call was for another recipe, its notes are damaged, or without notes the folder is not empty.
    """
    for path in (folder / META, folder / PROGRESS):
        if path.exists():
            notes = _read_notes(path)
            if notes.get("cursor", ...) is None:
                clear(folder)
                return None
            old, new = notes["arguments"], recipe.to_dict()
            differ = [f"{name} was {old.get(name)!r}, now {new[name]!r}" for name in new if old.get(name) != new[name]]
            if differ:
                raise DataError(f"{folder} was made with other arguments: {'; '.join(differ)}; {_START_ANEW}")
            return notes
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            raise DataError(f"{folder} is not empty and was not made by this command: it holds {path.name}")
    return None


def _read_notes(path: Path) -> Notes:
    try:
        notes: Notes = json.loads(path.read_bytes())
    except ValueError:
        notes = {}
    if not isinstance(notes, dict) or not isinstance(notes.get("arguments"), dict):
        raise DataError(f"{path}: is damaged or was not written by this command; {_START_ANEW}")
    return notes


def check_text(folder: Path, descriptions: list[dict[str, Any]], notes: Notes) -> None:
    """Raises DataError naming the first source whose files are others than noted, or of other sizes."""
    for new, old in zip(descriptions, notes["sources"], strict=True):
        # What was passed over may have changed: it counts our own files where the folder lies within its source.
        if {**new, "skipped": None} != {**old, "skipped": None}:
            raise DataError(f"{folder}: the files of {new['name']} have changed since it was made; {_START_ANEW}")


def save(folder: Path, name: str, notes: Notes) -> None:
    """Writes meta.json or progress.json, whole or not at all."""
    write_file(folder / name, json.dumps(notes, indent=1).encode() + b"\n")


def clear(folder: Path) -> None:
    """Deletes what this command writes and nothing else; a folder half cleared is neither finished nor a stranger's."""
    ours = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    for path in sorted(ours, key=lambda path: (path.name == PROGRESS, path.name != META)):
        path.unlink()
