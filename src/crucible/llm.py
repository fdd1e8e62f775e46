"""The library API: a model, its tokenizer and an engine in one process.

llm = LLM("artifacts/demo")
for piece in llm.stream("It is a truth", SamplingParams(max_tokens=40)):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from crucible.engine import runner
from crucible.engine.artifact import ArtifactError, read_config, read_generation
from crucible.engine.backend import Backend
from crucible.engine.request import FinishReason, RequestError, SamplingParams
from crucible.engine.weights import load_weights
from crucible.tokenizer import IncrementalDecoder, Tokenizer, TokenizerError

BackendName = Literal["reference"]
BACKENDS: Final[tuple[str, ...]] = get_args(BackendName)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to a stream.

    Attributes:
        text: characters that became whole; often "", when a character is spread over several tokens.
        token_id: the token, also where it ended the request and so is not text.
        finish_reason: of the last piece of a stream, else None.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: `text` is that of `token_ids`, which end with the id that ended it, if one did."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seed: int


class LLM:
    """A model ready to generate.

    Args:
        model: an artifact's folder.
        backend: "reference" is the float64 oracle in numpy: exact, slow, every architecture.

    Raises:
        ArtifactError, TokenizerError: the folder does not hold a well-formed artifact; the message names the file.
        RequestError: there is no such backend.
    """

    def __init__(self, model: str | Path, *, backend: BackendName = "reference") -> None:
        folder = Path(model)
        if not folder.is_dir():
            raise ArtifactError(f"{model}: no such folder; a model is an artifact, as `crucible export` makes it")
        self.config = read_config(folder)
        self.eos_ids = read_generation(folder).eos_token_ids
        self.tokenizer = Tokenizer.from_file(folder)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ArtifactError(
                f"{folder}: its tokenizer has {self.tokenizer.vocab_size} tokens, its model {self.config.vocab_size}"
            )
        self._backend = _make_backend(backend, folder)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt: of ordinary text, or the ids that were given."""
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, use_cache: bool = True
    ) -> Iterator[Piece]:
        """The continuation of a prompt, piece by piece; the texts joined are the text of `generate`.

        Args:
            prompt: text or token ids; not empty.
            params: None decodes greedily, 128 tokens at most.
            use_cache: False computes everything anew for each token: slower, the same tokens.

        Raises:
            RequestError: at the call: see `engine.runner.generate`.
        """
        tokens = runner.generate(
            self._backend, self.encode(prompt), params or SamplingParams(), eos_ids=self.eos_ids, use_cache=use_cache
        )
        return self._pieces(tokens)

    def _pieces(self, tokens: Iterable[runner.GeneratedToken]) -> Iterator[Piece]:
        decoder = IncrementalDecoder(self.tokenizer, continuing=True)
        for token in tokens:
            text = "" if token.finish in ("stop", "error") else _text(decoder, token.token_id)
            if token.finish is not None:
                text += decoder.flush()
            yield Piece(text, token.token_id, token.finish)

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Completions of one prompt or several, `params.n` for each prompt, in order.

        Raises:
            RequestError: as `stream`.
        """
        params = params or SamplingParams()
        return [self._complete(self.encode(p), choice) for p in _listed(prompts) for choice in params.choices()]

    def _complete(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> Completion:
        pieces = list(self.stream(prompt_ids, params))
        finish_reason = pieces[-1].finish_reason
        assert finish_reason is not None, "a stream ends with a finish reason"
        return Completion(
            prompt_ids=prompt_ids,
            token_ids=tuple(piece.token_id for piece in pieces),
            text="".join(piece.text for piece in pieces),
            finish_reason=finish_reason,
            seed=params.seed,
        )

    def logits(self, prompt: str | Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits f32 [T, V] after each token of a prompt. Raises RequestError as `engine.runner.logits`."""
        return runner.logits(self._backend, self.encode(prompt))


def _text(decoder: IncrementalDecoder, token_id: int) -> str:
    """What a token adds; "" for an id that the model has and the tokenizer has not: embeddings are padded."""
    try:
        return decoder.push(token_id)
    except TokenizerError:
        return ""


def _listed(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    return [item for item in prompts if not isinstance(item, int)]


def _make_backend(name: str, folder: Path) -> Backend:
    if name != "reference":
        raise RequestError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    from crucible.engine.reference import ReferenceBackend

    config = read_config(folder)
    return ReferenceBackend(config, load_weights(folder, config))
