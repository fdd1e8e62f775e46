"""Fixtures of the tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Has torch compute in one thread: toy sizes gain nothing from more, and recorded thread counts are known."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
