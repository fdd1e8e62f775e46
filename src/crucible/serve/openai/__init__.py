"""OpenAI's API: its requests into native ones, and what these yield into its replies. No I/O."""

from crucible.serve.openai.chat import CHAT
from crucible.serve.openai.completions import COMPLETIONS
from crucible.serve.openai.errors import refusal
from crucible.serve.openai.models import model, models

__all__ = ["CHAT", "COMPLETIONS", "model", "models", "refusal"]
