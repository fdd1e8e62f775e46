"""What a request is to those who speak text: its parameters, the pieces of a stream, the finished completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crucible.engine import request
from crucible.engine.backend import TokenLogprobs
from crucible.engine.request import FinishReason
from crucible.tokenizer import IncrementalDecoder, Tokenizer, TokenizerError
from crucible.tokenizer.stop import StopMatcher, checked_stops


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(request.SamplingParams):
    """The engine's parameters and, for the text that is made of its tokens, stop strings.

    Attributes:
        stop: strings that end the text, which then ends before them; one string stands for a list of one. They are
            looked for in what follows the first min_tokens tokens, across the borders of tokens.

    Raises:
        RequestError, StopError: as the engine's; as `tokenizer.stop.checked_stops`.
    """

    stop: str | Sequence[str] | None = ()

    def __post_init__(self) -> None:
        request.SamplingParams.__post_init__(self)
        object.__setattr__(self, "stop", checked_stops(self.stop))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to a stream.

    Attributes:
        text: characters that became certain; often "", when a character is spread over several tokens, or when the
            text could still become a stop string.
        token_id: the token, also where it ended the request and so is not text; None with finish_reason "error",
            which means that no logit was usable.
        finish_reason: of the last piece of a stream, else None.
        stop_reason: the stop string, or the id among stop_token_ids, that ended the request.
        logprobs: of the token, if the parameters ask for them.
        prompt_logprobs: with the first piece, as `Completion.prompt_logprobs`.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    Attributes:
        prompt_ids: the prompt's tokens.
        token_ids: the tokens drawn. The last is the one that ended the request, if one did: an end-of-text or stop
            id, which is not text, or the token with which a stop string was complete.
        text: of the tokens, up to the stop string if there is one.
        finish_reason: "stop" for an end-of-text id, a stop id or a stop string; "length" for max_tokens; "error" where
            no logit was usable.
        stop_reason: the stop string, or the id among stop_token_ids, that ended the request.
        seed: that it was drawn with.
        logprobs: one for each of `token_ids`, if the parameters ask for them.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, if the parameters ask for them.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[float, ...] | None

    @classmethod
    def of(cls, prompt_ids: tuple[int, ...], params: request.SamplingParams, pieces: Sequence[Piece]) -> Completion:
        """What a finished stream adds up to."""
        finish_reason = pieces[-1].finish_reason
        assert finish_reason is not None, "the last piece of a stream has a finish reason"
        logprobs = tuple(piece.logprobs for piece in pieces if piece.logprobs is not None)
        return cls(
            prompt_ids=prompt_ids,
            token_ids=tuple(piece.token_id for piece in pieces if piece.token_id is not None),
            text="".join(piece.text for piece in pieces),
            finish_reason=finish_reason,
            stop_reason=pieces[-1].stop_reason,
            seed=params.seed,
            logprobs=None if params.logprobs is None else logprobs,
            prompt_logprobs=pieces[0].prompt_logprobs,
        )


class CompletionText:
    """Makes the pieces of one stream from its tokens.

    Args:
        tokenizer: the model's.
        params: of the request; those of the engine have no stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, params: request.SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer, continuing=True)
        self._stops = StopMatcher(checked_stops(getattr(params, "stop", None)))
        self._params = params
        self.has_stops = bool(getattr(params, "stop", None))
        """Whether each token must be looked at in turn: a stop string may end the text at any."""
        self._num_tokens = 0
        self.is_finished = False
        """Whether the last piece is made. A stop string ends the text before the engine knows; tokens that it draws
        after that belong to nobody."""

    def push(
        self,
        token_id: int | None,
        finish: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
        prompt_logprobs: tuple[float, ...] | None = None,
    ) -> Piece:
        """The piece that a token makes; arguments as the fields of `engine.engine.Event`."""
        if finish == "error":
            token_id = None
        text = self._decoded(token_id) if token_id is not None and finish != "stop" else ""
        if finish is not None:
            text += self._decoder.flush()
        self._num_tokens += 1
        if self._num_tokens > self._params.min_tokens:
            text = self._stops.push(text)
        stop_reason: str | int | None = self._stops.matched
        if stop_reason is not None:
            finish = "stop"
        elif finish is not None:
            text += self._stops.flush()
            stop_reason = token_id if finish == "stop" and token_id in self._params.stop_token_ids else None
        self.is_finished = finish is not None
        return Piece(text, token_id, finish, stop_reason, logprobs, prompt_logprobs)

    def push_run(self, token_ids: Sequence[int]) -> list[str]:
        """Texts of tokens that do not end the request, as of the pieces that `push` makes of each. Not for a text that
        has stop strings."""
        self._num_tokens += len(token_ids)
        return self._decoder.push_run(token_ids)

    def _decoded(self, token_id: int) -> str:
        """What a token adds; "" for an id that the model has and the tokenizer has not: embeddings are padded."""
        try:
            return self._decoder.push(token_id)
        except TokenizerError:
            return ""
