"""The header `anthropic-version`: a date, and what is spoken here is the version of the first one allowed.

No date after that has changed what is spoken here: the newest clients send dates that are years later and understand
the same replies. So a later date is taken, and what a later version may have that this server has not is refused where
it is asked for, by the name of its field.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Final

from crucible.serve.protocol import ApiError

HEADER: Final = "anthropic-version"
FIRST_VERSION: Final = date(2023, 6, 1)
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


def check_version(value: str | None) -> None:
    """Raises ApiError for the value of the header if it is no date or an earlier one; None, for no header, is fine."""
    if value is None:
        return
    try:
        version = date.fromisoformat(value) if _DATE.fullmatch(value) else None
    except ValueError:
        version = None
    if version is None or version < FIRST_VERSION:
        raise ApiError("invalid", f"{HEADER} must be a date as in {FIRST_VERSION}, and no earlier one", param=HEADER)
