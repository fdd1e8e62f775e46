"""Text to token ids and back: GPT-2's tokenizer, any tokenizer.json, or one trained here. Works without torch."""

from crucible.tokenizer.byte_level import parse_train_spec
from crucible.tokenizer.spec import TokenizerError
from crucible.tokenizer.stream import IncrementalDecoder
from crucible.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer", "TokenizerError", "parse_train_spec"]
