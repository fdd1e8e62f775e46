"""OpenAI's replies: whole ones and streams, field by field, from bursts as they may come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from crucible.serve.openai import CHAT, COMPLETIONS
from crucible.serve.protocol import (
    ApiError,
    Burst,
    Choice,
    End,
    FinishReason,
    Reply,
    Served,
    TokenChance,
    TokenScore,
)

SERVED = Served(
    model_id="toy",
    aliases=frozenset({"gpt-4o"}),
    created=1_700_000_000,
    context=128,
    vocab_size=300,
    fingerprint="fp_abc",
    decode=lambda ids: "".join(chr(97 + token_id) for token_id in ids),
)
SURFACES = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (COMPLETIONS, {"prompt": "Hi"}),
}

each_endpoint = pytest.mark.parametrize("endpoint", SURFACES)


def reply_to(endpoint: str, **fields: Any) -> Reply:
    surface, least = SURFACES[endpoint]
    _, reply = surface.read(json.dumps({"model": "gpt-4o", **least, **fields}).encode(), SERVED)
    return reply


def end(reason: FinishReason = "length", prompt_tokens: int = 3, completion_tokens: int = 2) -> End:
    return End(reason, None, prompt_tokens, completion_tokens, seed=1)


def chance(token_id: int, data: bytes, logprob: float) -> TokenChance:
    return TokenChance(token_id, data.decode(errors="replace"), data, logprob)


def choice(text: str, index: int = 0, **fields: Any) -> Choice:
    values = {"prompt_ids": (1, 2), "token_ids": [0, 1], "scores": None, "prompt_scores": None, "end": end(), **fields}
    return Choice(index=index, text=text, **values)


def whole(reply: Reply, *choices: Choice) -> Any:
    return json.loads(reply.whole(choices))


def streamed(reply: Reply, bursts: Iterable[Burst], prompt_tokens: Sequence[int] = (3,)) -> list[Any]:
    """The data of a stream's events; each is one line of JSON, and the last is [DONE]."""
    data = reply.begin(prompt_tokens) + b"".join(map(reply.burst, bursts)) + reply.finish()
    *events, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def choices_of(chunks: Iterable[Any]) -> list[Any]:
    return [entry for chunk in chunks for entry in chunk["choices"]]


def text_of(entry: Any) -> str:
    return entry["text"] if "text" in entry else entry["delta"].get("content", "")


# ---- whole ------------------------------------------------------------------------------------------------------


def test_a_chat_is_a_message_of_the_assistant():
    body = whole(reply_to("chat"), choice("Hello", end=end("stop")))
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "toy",
        "system_fingerprint": "fp_abc",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_a_completion_is_text():
    body = whole(reply_to("completions"), choice(" there"))
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "toy",
        "system_fingerprint": "fp_abc",
        "choices": [{"index": 0, "text": " there", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_usage_counts_each_prompt_once():
    reply = reply_to("completions", prompt=["a", "b"], n=2)
    ends = [end(prompt_tokens=tokens, completion_tokens=drawn) for tokens, drawn in ((3, 5), (3, 6), (10, 7), (10, 8))]
    body = whole(reply, *[choice("x", index, end=end) for index, end in enumerate(ends)])
    assert body["usage"] == {"prompt_tokens": 13, "completion_tokens": 26, "total_tokens": 39}
    assert [entry["index"] for entry in body["choices"]] == [0, 1, 2, 3]


@each_endpoint
def test_ids_differ(endpoint: str):
    assert whole(reply_to(endpoint), choice("x"))["id"] != whole(reply_to(endpoint), choice("x"))["id"]


@each_endpoint
def test_a_failed_choice_is_no_reply(endpoint: str):
    with pytest.raises(ApiError) as caught:
        reply_to(endpoint).whole([choice("x"), choice("", 1, end=end("error"))])
    assert caught.value.kind == "internal"


# ---- streams ----------------------------------------------------------------------------------------------------

AWKWARD = ['"', "\\", "\n", "\u2028", "é", "👍🏽", "</script>", "\x7f", "\x00"]


@each_endpoint
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_a_stream_has_a_chunk_for_each_token_that_shows_something(endpoint: str, options: Any):
    reply = reply_to(endpoint, stream=True, stream_options=options)
    bursts = [
        Burst(0, [1], ["a"]),
        Burst(0, [2, 3, 4], ["b", "", " c"]),
        *[Burst(0, [5], [text]) for text in AWKWARD],
        Burst(0, [6], [""], end=end("stop", completion_tokens=14)),
    ]
    chunks = streamed(reply, bursts)
    kind = {"chat": "chat.completion.chunk", "completions": "text_completion"}[endpoint]
    usage = chunks.pop() if options else None
    for chunk in chunks:
        assert set(chunk) - {"usage"} == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert (chunk["object"], chunk["model"], chunk["system_fingerprint"]) == (kind, "toy", "fp_abc")
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
        assert [entry["index"] for entry in chunk["choices"]] == [0]
        assert ("usage" in chunk) == bool(options)
    entries = choices_of(chunks)
    if endpoint == "chat":
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        assert entries.pop(0) == first
        assert entries[0] == {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
        assert entries[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    else:
        assert entries[0] == {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
        assert entries[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert [text_of(entry) for entry in entries[:-1]] == ["a", "b", " c", *AWKWARD]
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 14, "total_tokens": 17}
        assert (usage["id"], usage["object"]) == (chunks[0]["id"], kind)
    if len(options) == 1:
        assert all(chunk["usage"] is None for chunk in chunks)
    if len(options) == 2:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        opening = [0] if endpoint == "chat" else []
        assert counts == [*opening, 1, 2, 4, *range(5, 14), 14]


@each_endpoint
def test_nothing_is_sent_before_the_first_token(endpoint: str):
    assert reply_to(endpoint, stream=True).begin([3]) == b""


@each_endpoint
def test_choices_of_a_stream_are_told_apart(endpoint: str):
    reply = reply_to(endpoint, stream=True, n=2, stream_options={"include_usage": True})
    chunks = streamed(
        reply,
        [
            Burst(1, [1], ["x"]),
            Burst(0, [1], ["a"]),
            Burst(1, [1], ["y"], end=end("length", completion_tokens=2)),
            Burst(0, [], [], end=end("stop", completion_tokens=1)),
        ],
    )
    entries = choices_of(chunks)
    texts = {index: "".join(text_of(entry) for entry in entries if entry["index"] == index) for index in (0, 1)}
    assert texts == {0: "a", 1: "xy"}
    reasons = {entry["index"]: entry["finish_reason"] for entry in entries if entry["finish_reason"]}
    assert reasons == {0: "stop", 1: "length"}
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    if endpoint == "chat":
        assert [entry["index"] for entry in entries if "role" in entry["delta"]] == [1, 0]


@each_endpoint
def test_a_stream_without_usage_has_none(endpoint: str):
    for options in (None, {"include_usage": False}, {"include_usage": None}):
        reply = reply_to(endpoint, stream=True, stream_options=options)
        chunks = streamed(reply, [Burst(0, [1], ["a"], end=end(completion_tokens=1))])
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@each_endpoint
def test_a_failure_is_the_last_event(endpoint: str):
    reply = reply_to(endpoint, stream=True)
    reply.burst(Burst(0, [1], ["a"]))
    event = reply.failed(ApiError("unavailable", "the engine stopped"))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:]) == {
        "error": {
            "message": "the engine stopped",
            "type": "server_error",
            "param": None,
            "code": "service_unavailable",
        }
    }
    assert reply.finish() == b"", "no [DONE]: what was sent is not all"


@each_endpoint
def test_a_choice_without_a_usable_logit_fails_the_stream(endpoint: str):
    reply = reply_to(endpoint, stream=True)
    events = (reply.burst(Burst(0, [], [], end=end("error"))) + reply.finish()).decode().strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "no_usable_logit"
    assert not any("finish_reason" in event and '"error"' in event for event in events[:-1])


# ---- log-probabilities ------------------------------------------------------------------------------------------

E_ACUTE = "é".encode()
SCORES = [
    TokenScore(chance(1, b"a", -0.5), [chance(1, b"a", -0.5), chance(2, b"b", -1.5)]),
    TokenScore(chance(3, E_ACUTE[:1], -2.0), [chance(4, E_ACUTE[1:], -0.25), chance(5, b"\xff", -9999.0)]),
    TokenScore(chance(4, E_ACUTE[1:], -0.25), []),
    TokenScore(chance(6, b"!", -1.0), [chance(7, b"!", -0.75)]),
]
SCORED = {
    "token_ids": [1, 3, 4, 6],
    "scores": SCORES,
    "end": end(completion_tokens=4),
}
SCORED_BURSTS = [
    Burst(0, [1, 3], ["a", ""], scores=SCORES[:2]),
    Burst(0, [4], ["é"], scores=SCORES[2:3]),
    Burst(0, [6], ["!"], scores=SCORES[3:], end=end(completion_tokens=4)),
]


def entry_of(score: TokenChance) -> dict[str, Any]:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.bytes)}


def test_log_probabilities_of_a_chat_have_bytes():
    (entry,) = whole(reply_to("chat", logprobs=True, top_logprobs=2), choice("aé!", **SCORED))["choices"]
    expected = [{**entry_of(score.chosen), "top_logprobs": [entry_of(top) for top in score.top]} for score in SCORES]
    assert entry["logprobs"] == {"content": expected, "refusal": None}
    assert bytes(byte for token in entry["logprobs"]["content"] for byte in token["bytes"]).decode() == "aé!"
    assert entry["logprobs"]["content"][1]["token"] == "\ufffd"

    chunks = streamed(reply_to("chat", logprobs=True, top_logprobs=2, stream=True), SCORED_BURSTS)
    opening, *pieces, closing = choices_of(chunks)
    assert opening["logprobs"] is None
    assert closing["logprobs"] is None
    assert [text_of(piece) for piece in pieces] == ["a", "", "é", "!"], "a token is told when it is drawn"
    assert [piece["logprobs"] for piece in pieces] == [{"content": [row], "refusal": None} for row in expected]


def test_log_probabilities_of_a_completion_are_a_table():
    (entry,) = whole(reply_to("completions", logprobs=2), choice("aé!", **SCORED))["choices"]
    assert entry["logprobs"] == {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [-0.5, -2.0, -0.25, -1.0],
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"bytes:\\xa9": -0.25, "bytes:\\xff": -9999.0, "bytes:\\xc3": -2.0},
            {"bytes:\\xa9": -0.25},
            {"!": -0.75},
        ],
    }, "of two tokens that are written alike the likelier one is named"
    *pieces, closing = choices_of(streamed(reply_to("completions", logprobs=2, stream=True), SCORED_BURSTS))
    assert closing["logprobs"] is None
    for name, column in entry["logprobs"].items():
        assert [row for piece in pieces for row in piece["logprobs"][name]] == column


# ---- echo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "text"), [("Hi", "Hi"), ([7, 8], "hi"), (["Hi"], "Hi"), ([[7, 8]], "hi")])
def test_an_echoed_text_begins_with_its_prompt(prompt: Any, text: str):
    (entry,) = whole(reply_to("completions", prompt=prompt, echo=True), choice(" you"))["choices"]
    assert entry == {"index": 0, "text": f"{text} you", "logprobs": None, "finish_reason": "length"}
    chunks = streamed(
        reply_to("completions", prompt=prompt, echo=True, stream=True),
        [Burst(0, [1], [" y"]), Burst(0, [1], ["ou"], end=end())],
    )
    assert [text_of(entry) for entry in choices_of(chunks)] == [text, " y", "ou", ""]


def test_each_choice_is_echoed_with_its_own_prompt():
    reply = reply_to("completions", prompt=["a", "b"], n=2, echo=True)
    body = whole(reply, *[choice("!", index) for index in range(4)])
    assert [entry["text"] for entry in body["choices"]] == ["a!", "a!", "b!", "b!"]


PROMPT_SCORES = [None, chance(8, b"\xc3", -3.0), chance(9, b"\xa9x", -4.0)]


@pytest.mark.parametrize(("prompt", "first"), [("Aéx", "A"), ("éx", ""), ("x", "")])
@pytest.mark.parametrize("num_top", [0, 2])
def test_an_echo_has_the_log_probabilities_of_the_prompt(prompt: str, first: str, num_top: int):
    """The first token is what stands before the second: nothing, for a beginning-of-text token."""
    fields = {"prompt": prompt, "echo": True, "logprobs": num_top}
    scored = choice("a", prompt_scores=PROMPT_SCORES, scores=SCORES[:1], end=end(completion_tokens=1))
    (entry,) = whole(reply_to("completions", **fields), scored)["choices"]
    table = entry["logprobs"]
    assert entry["text"] == prompt + "a"
    assert table["tokens"] == [first, "bytes:\\xc3", "bytes:\\xa9\\x78", "a"]
    assert table["token_logprobs"] == [None, -3.0, -4.0, -0.5]
    if prompt != "x":
        assert table["text_offset"] == [0, len(first), len(first), len(prompt)]
    else:
        assert table["text_offset"][-1] == len(prompt), "also where the text is not what the tokens spell"
    own = [{"bytes:\\xc3": -3.0}, {"bytes:\\xa9\\x78": -4.0}]
    assert table["top_logprobs"][:3] == [None, *([None, None] if num_top else own)]

    bursts = [Burst(0, [1], ["a"], scores=SCORES[:1], prompt_scores=PROMPT_SCORES, end=end(completion_tokens=1))]
    entries = choices_of(streamed(reply_to("completions", **fields, stream=True), bursts))
    assert [text_of(entry) for entry in entries] == [prompt, "a", ""]
    for name, column in table.items():
        assert [row for piece in entries[:2] for row in piece["logprobs"][name]] == column


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_scoring_a_prompt_shows_and_counts_no_token(logprobs: int | None, reason: FinishReason):
    fields = {"prompt": "Aéx", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    scored = {} if logprobs is None else {"scores": SCORES[:1], "prompt_scores": PROMPT_SCORES}
    body = whole(
        reply_to("completions", **fields), choice("a", token_ids=[1], **scored, end=end(reason, completion_tokens=1))
    )
    (entry,) = body["choices"]
    assert (entry["text"], entry["finish_reason"]) == ("Aéx", "length")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    if logprobs is None:
        assert entry["logprobs"] is None
    else:
        assert entry["logprobs"]["token_logprobs"] == [None, -3.0, -4.0]

    reply = reply_to("completions", **fields, stream=True, stream_options={"include_usage": True})
    *chunks, usage = streamed(reply, [Burst(0, [1], ["a"], **scored), Burst(0, [], [], end=end(reason))])
    assert [text_of(entry) for entry in choices_of(chunks)] == ["Aéx", ""]
    assert choices_of(chunks)[0]["logprobs"] == entry["logprobs"]
    assert choices_of(chunks)[-1]["finish_reason"] == "length"
    assert usage["usage"] == body["usage"]
