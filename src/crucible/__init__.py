"""Train small language models from scratch and serve them, bit for bit reproducible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crucible.completion import SamplingParams
    from crucible.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the library API when it is first asked for, so that `import crucible` stays light."""
    if name == "LLM":
        from crucible.llm import LLM

        return LLM
    if name == "SamplingParams":
        from crucible.completion import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
