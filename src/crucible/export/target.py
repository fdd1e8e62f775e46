"""A folder that appears complete or not at all, where an artifact may stand already."""

from __future__ import annotations

import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from crucible.engine.artifact import CONFIG_NAME, PROVENANCE_NAME, ArtifactError
from crucible.files import sync_file, sync_folder


@contextmanager
def new_artifact(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder to write an artifact into, which takes the place of `out` when the block ends.

    With `force` an artifact of ours that stands there is moved aside, replaced and removed; for the moment between two
    renames neither stands there, a mixture never does.

    Raises:
        ArtifactError: `out` exists and may not be replaced, or cannot be written; nothing is left behind then, and
            what stood there still does.
    """
    target = Path(out).resolve()
    check_target(target, force=force)
    temporary = target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            # Some versions of safetensors make a file that only its owner can read.
            path.chmod(stat.S_IMODE((temporary / CONFIG_NAME).stat().st_mode))
            sync_file(path)
        sync_folder(temporary)
        check_target(target, force=force)  # again: writing took a while
        _put(temporary, target)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(out: Path, *, force: bool) -> None:
    """Raises ArtifactError: `out` exists, and may not be replaced or is not an artifact of ours."""
    if not out.exists():
        return
    if not force:
        raise ArtifactError(f"{out} exists; choose another folder or replace it with force (--force)")
    if not (out / PROVENANCE_NAME).is_file():
        raise ArtifactError(
            f"{out} is not an artifact of ours (it has no {PROVENANCE_NAME}): not replaced, even by force"
        )


def _put(temporary: Path, out: Path) -> None:
    """Moves a finished folder to its place, and what stood there out of the way and then off the disk."""
    old = out.with_name(f"{temporary.name}-old")
    if out.exists():
        out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
