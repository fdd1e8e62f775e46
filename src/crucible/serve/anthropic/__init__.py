"""Anthropic's API: its requests into native ones, and what these yield into its replies. No I/O."""

from crucible.serve.anthropic.errors import refusal
from crucible.serve.anthropic.messages import COUNT_TOKENS, MESSAGES
from crucible.serve.anthropic.models import model, models
from crucible.serve.anthropic.version import check_version

__all__ = ["COUNT_TOKENS", "MESSAGES", "check_version", "model", "models", "refusal"]
