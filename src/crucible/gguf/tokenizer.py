"""A tokenizer as a .gguf file holds it, made into the content of a tokenizer.json.

llama.cpp knows two families. "gpt2" is byte-level BPE: the file has pieces, merges and the name of a rule by which text
is cut into words before merging, `tokenizer.ggml.pre`; the rules themselves are in llama.cpp's source
(src/llama-vocab.cpp) and in the tokenizer.json of the models that they come from. "llama" is SentencePiece: pieces with
scores, where the pair that makes the piece of highest score is merged first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from crucible.engine.safetensors_file import ArtifactError, shown
from crucible.gguf.file import GgufFile
from crucible.tokenizer.spec import SPACE_MARK

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's and Qwen's words; they differ in how many digits stand together."""


def _cut(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule, by its names in llama.cpp, in the terms of a tokenizer.json.

    `ignore_merges`: a word that is a piece is taken whole. `adds_bos` holds where the file does not say.
    """

    names: tuple[str, ...]
    pre_tokenizer: Mapping[str, Any]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS: Final = (
    PreTokenizer(("gpt-2",), _byte_level(use_regex=True)),
    PreTokenizer(("smollm",), _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))),
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3"),
        _sequence(_cut(_WORDS.replace("DIGITS", r"\p{N}{1,3}")), _byte_level(use_regex=False)),
        ignore_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(
        ("qwen2", "deepseek-r1-qwen"),
        _sequence(_cut(_WORDS.replace("DIGITS", r"\p{N}")), _byte_level(use_regex=False)),
        normalizer={"type": "NFC"},
    ),
)


def tokenizer_document(file: GgufFile) -> dict[str, Any]:
    """The tokenizer of a file as the JSON value of a tokenizer.json.

    Control tokens become added tokens marked special, those that a user defined become added tokens that are not.
    Where the model wants a beginning-of-text token before every text, the document's post-processor says so.

    Raises:
        ArtifactError: a key is missing or malformed, or names a tokenizer or a rule that is not known here.
    """
    source = _Source(file)
    model = source.get("model", str)
    if model == "gpt2":
        return _byte_level_document(source)
    if model == "llama":
        return _sentencepiece_document(source)
    raise source.error("model", f"must be gpt2 or llama, not {shown(model)}")


class _Source:
    """The pairs of a file under tokenizer.ggml, and its pieces by what they are."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens: list[str] = self.strings("tokens")
        self.types: list[int] = self.get("token_type", list)
        if len(self.types) != len(self.tokens):
            raise self.error(
                "token_type", f"must have {len(self.tokens)} elements, as tokens has, not {len(self.types)}"
            )
        if unknown := set(self.types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
            raise self.error("token_type", f"holds an unknown type {shown(unknown.pop())}")

    def error(self, name: str, why: str) -> ArtifactError:
        return ArtifactError(f"{self._file.path}: tokenizer.ggml.{name} {why}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._file.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            raise ArtifactError(f"{self._file.path}: missing key: tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            raise self.error(name, f"must be of type {kind.__name__}, not {shown(value)}")
        return value

    def strings(self, name: str) -> list[str]:
        values: list[str] = self.get(name, list)
        if not values or not isinstance(values[0], str):  # the elements of an array are of one type
            raise self.error(name, "must be an array of strings")
        return values

    def vocab(self, *types: int) -> dict[str, int]:
        """Ids of the pieces of some types. Raises ArtifactError where a piece has two."""
        vocab: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in types and vocab.setdefault(token, token_id) != token_id:
                raise self.error("tokens", f"gives {shown(token)} the ids {vocab[token]} and {token_id}")
        return vocab

    def added_tokens(self) -> list[dict[str, Any]]:
        special = self.vocab(UNKNOWN, CONTROL)
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in special,
            }
            for token, token_id in self.vocab(UNKNOWN, CONTROL, USER_DEFINED).items()
        ]

    def post_processor(self, adds_bos: bool) -> dict[str, Any] | None:
        """A step that puts the beginning-of-text token first, where the file or else `adds_bos` says so."""
        if not self.get("add_bos_token", bool, default=adds_bos):
            return None
        bos_id = self.get("bos_token_id", int)
        if not 0 <= bos_id < len(self.tokens):
            raise self.error("bos_token_id", f"must be an id below {len(self.tokens)}, not {bos_id}")
        bos, text = self.tokens[bos_id], {"Sequence": {"id": "A", "type_id": 0}}
        first = {"SpecialToken": {"id": bos, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, first, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        }

    def document(
        self,
        *,
        model: Mapping[str, Any],
        normalizer: Any,
        pre_tokenizer: Any,
        decoder: Any,
        adds_bos: bool,
    ) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self.added_tokens(),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.post_processor(adds_bos),
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "dropout": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                **model,
            },
        }


def _byte_level_document(source: _Source) -> dict[str, Any]:
    name = source.get("pre", str)
    rule = next((rule for rule in PRE_TOKENIZERS if name in rule.names), None)
    if rule is None:
        known = ", ".join(name for rule in PRE_TOKENIZERS for name in rule.names)
        raise source.error("pre", f"must be one of {known}, not {shown(name)}")
    model = {
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": rule.ignore_merges,
        "vocab": source.vocab(NORMAL, UNKNOWN, CONTROL, USER_DEFINED),
        "merges": source.strings("merges"),
    }
    return source.document(
        model=model,
        normalizer=rule.normalizer,
        pre_tokenizer=rule.pre_tokenizer,
        decoder=_byte_level(use_regex=True),
        adds_bos=rule.adds_bos,
    )


def _sentencepiece_document(source: _Source) -> dict[str, Any]:
    scores = source.get("scores", list)
    if len(scores) != len(source.tokens) or not all(isinstance(score, float) for score in scores):
        raise source.error("scores", f"must be {len(source.tokens)} numbers, one for each of tokens")
    vocab = source.vocab(NORMAL, UNKNOWN, CONTROL, BYTE)
    unknown = source.get("unknown_token_id", int, default=-1)
    normal = source.vocab(NORMAL)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}]
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if source.get("add_space_prefix", bool, default=True):
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "unk_token": source.tokens[unknown] if 0 <= unknown < len(source.tokens) else None,
        "fuse_unk": True,
        "byte_fallback": BYTE in source.types,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(pair) for pair in merges_by_score(normal, [scores[i] for i in normal.values()])],
    }
    return source.document(
        model=model,
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        adds_bos=True,
    )


def merges_by_score(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, that of the highest score first; `scores` in the order of `vocab`.

    Of pairs that make the same piece, those with the longer first part come first, as in `transformers`.
    """

    def pairs() -> Iterator[tuple[float, str, str]]:
        for piece, score in zip(vocab, scores, strict=True):
            for middle in range(1, len(piece)):
                if piece[:middle] in vocab and piece[middle:] in vocab:
                    yield score, piece[:middle], piece[middle:]

    ranked = sorted(pairs(), key=lambda pair: (-pair[0], -len(pair[1]), -len(pair[2])))
    return [(left, right) for _, left, right in ranked]
