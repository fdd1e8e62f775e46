"""One prompt by four doors: the native API, OpenAI's two endpoints and Anthropic's give the same tokens, whatever else
the server does meanwhile, and share its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_templates import FAMILIES
from serve_process import Server, serving
from toy_artifact import write_toy_artifact

from crucible.models import resolve
from crucible.tokenizer import Tokenizer
from crucible.tokenizer.chat import ChatTemplate

SYSTEM = "Be brief. <|im_end|>"
TURNS = [
    {"role": "user", "content": "the cat — 你好"},
    {"role": "assistant", "content": "sat on"},
    {"role": "user", "content": "and the dog?"},
]
CONVERSATION = [{"role": "system", "content": SYSTEM}, *TURNS]
AT_RANDOM = {"temperature": 3.0, "ignore_eos": True}
"""The toy model then draws bytes at random, so that characters are cut in every way."""


@dataclass(frozen=True)
class Told:
    """What a caller of any surface learns of its reply."""

    text: str
    num_prompt: int
    num_output: int
    is_cut: bool
    """Whether a limit ended it, and neither the model nor a stop string."""


Events = list[dict[str, Any]]


@dataclass(frozen=True)
class Door:
    """One surface: where it is, how it names things, and how its replies are read.

    Attributes:
        path, streaming_path: of the two kinds of reply.
        body: of a request for this conversation, whose tokens are the ids.
        whole, streamed: what a reply says.
        stop: its name for stop strings.
    """

    path: str
    streaming_path: str
    body: Callable[[Sequence[Any], Sequence[int]], dict[str, Any]]
    whole: Callable[[Any], Told]
    streamed: Callable[[Events], Told]
    stop: str = "stop"


def _native(text: str, end: Any) -> Told:
    usage = end["usage"]
    return Told(text, usage["prompt_tokens"], usage["completion_tokens"], end["finish_reason"] == "length")


def _openai(text: str, reason: str, usage: Any) -> Told:
    return Told(text, usage["prompt_tokens"], usage["completion_tokens"], reason == "length")


def _openai_streamed(events: Events, text_of: Callable[[Any], str]) -> Told:
    choices = [choice for event in events for choice in event["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return _openai("".join(map(text_of, choices)), reason, events[-1]["usage"])


def _anthropic(text: str, stop: Any, usage: Any) -> Told:
    return Told(text, usage["input_tokens"], usage["output_tokens"], stop["stop_reason"] == "max_tokens")


def _anthropic_body(messages: Sequence[Any], ids: Sequence[int]) -> dict[str, Any]:
    if messages[0]["role"] != "system":
        return {"messages": list(messages)}
    return {"system": messages[0]["content"], "messages": list(messages[1:])}


DOORS = {
    "native": Door(
        "/v1/generate",
        "/v1/generate/stream",
        lambda messages, ids: {"messages": list(messages)},
        lambda body: _native(body["text"], body),
        lambda events: _native("".join(event["text"] for event in events), events[-1]),
    ),
    "completions": Door(
        "/v1/completions",
        "/v1/completions",
        lambda messages, ids: {"prompt": list(ids)},
        lambda body: _openai(body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]),
        lambda events: _openai_streamed(events, lambda choice: choice["text"]),
    ),
    "chat": Door(
        "/v1/chat/completions",
        "/v1/chat/completions",
        lambda messages, ids: {"messages": list(messages)},
        lambda body: _openai(
            body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], body["usage"]
        ),
        lambda events: _openai_streamed(events, lambda choice: choice["delta"].get("content", "")),
    ),
    "messages": Door(
        "/v1/messages",
        "/v1/messages",
        _anthropic_body,
        lambda body: _anthropic(body["content"][0]["text"], body, body["usage"]),
        lambda events: _anthropic(
            "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta"),
            events[-2]["delta"],
            events[-2]["usage"],
        ),
        stop="stop_sequences",
    ),
}

each_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


def body_of(door: Door, model_id: str, messages: Sequence[Any], ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    named = {door.stop if name == "stop" else name: value for name, value in fields.items()}
    model = {} if door.path == "/v1/generate" else {"model": model_id}
    return {**model, **door.body(messages, ids), **named}


class Caller:
    """Asks one server through any door."""

    def __init__(self, server: Server, template: ChatTemplate) -> None:
        self.server, self.template = server, template
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def ask(self, door: Door, messages: Sequence[Any] = CONVERSATION, *, streams: bool, **fields: Any) -> Told:
        body = body_of(door, self.server.model_id, messages, self.template.encode(messages), **fields)
        if not streams:
            reply = self.client.post(door.path, json=body)
            assert reply.status_code == 200, reply.text
            return door.whole(reply.json())
        if door.path == door.streaming_path:
            body["stream"] = True
        if door.path in ("/v1/completions", "/v1/chat/completions"):
            body["stream_options"] = {"include_usage": True}
        reply = self.client.post(door.streaming_path, json=body)
        assert reply.status_code == 200, reply.text
        return door.streamed(events_of(reply.text))


def events_of(text: str) -> Events:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def template_of(model: Path) -> ChatTemplate:
    loaded = resolve(model)
    return ChatTemplate(loaded.tokenizer, loaded.chat_template, loaded.special_tokens)


@pytest.fixture(scope="module")
def caller(server: Server, toy_model: Path) -> Iterator[Caller]:
    caller = Caller(server, template_of(toy_model))
    with caller.client:
        yield caller


# ---- the same tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True},
        {"seed": 7, **AT_RANDOM},
        {"seed": 8, "top_p": 0.9, "top_k": 100, "min_p": 0.001, **AT_RANDOM},
        {"seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5, **AT_RANDOM},
        {"seed": 3, "temperature": 3.0, "min_tokens": 5},
        AT_RANDOM,
    ],
    ids=["greedy", "seed", "filters", "penalties", "until the end", "default seed"],
)
def test_every_surface_gives_the_same_tokens_streamed_or_not(caller: Caller, fields: dict[str, Any]):
    told = {
        (name, streams): caller.ask(door, streams=streams, max_tokens=40, **fields)
        for name, door in DOORS.items()
        for streams in (False, True)
    }
    first = told["native", False]
    assert told == dict.fromkeys(told, first)
    assert first.num_prompt == len(caller.template.encode(CONVERSATION))
    body = body_of(DOORS["native"], "", CONVERSATION, (), max_tokens=40, **fields)
    token_ids = caller.client.post("/v1/generate", json=body).json()["token_ids"]
    assert len(token_ids) == first.num_output
    assert decoded(caller.template.tokenizer, token_ids, first) == first.text


def decoded(tokenizer: Tokenizer, token_ids: list[int], told: Told) -> str:
    """The text of tokens, without the one that ended them; ids that only the model's padding has are none."""
    shown = token_ids if told.is_cut else token_ids[:-1]
    return tokenizer.decode([token_id for token_id in shown if token_id < tokenizer.vocab_size])


def test_every_surface_ends_its_text_before_the_same_stop_string(caller: Caller):
    fields = {"max_tokens": 60, "seed": 5, **AT_RANDOM}
    text = caller.ask(DOORS["native"], streams=False, **fields).text
    stop = text[9:12]
    for door in DOORS.values():
        for streams in (False, True):
            told = caller.ask(door, streams=streams, **fields, stop=["\0never", stop])
            assert told.text == text[: text.index(stop)]
            assert not told.is_cut
            assert told.num_output < 60


def test_characters_that_are_cut_come_whole_from_every_surface(caller: Caller):
    """Only an a and the two bytes of another character are drawn, so that some of these are whole and some are not."""
    tokenizer = caller.template.tokenizer
    ids = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.token_bytes(token_id) in CUT]
    assert len(ids) == len(CUT)
    bias = {str(token_id): 100 for token_id in ids}
    fields = {"max_tokens": 80, "logit_bias": bias, "temperature": 10.0, "ignore_eos": True}
    texts = set()
    for seed in range(3):
        told = [caller.ask(door, streams=streams, seed=seed, **fields) for door in DOORS.values() for streams in (0, 1)]
        assert told == told[:1] * 8
        texts.add(told[0].text)
    assert all("é" in text and "\ufffd" in text for text in texts), "whole characters and broken ones"
    assert len(texts) == 3


CUT = ("é".encode()[:1], "é".encode()[1:], b"a")


def test_a_crowd_gets_what_each_would_have_got_alone(caller: Caller):
    """Sixty-four requests at once: all surfaces, streamed and not, prompts and lengths of many sizes."""
    asked = []
    for index in range(64):
        door = list(DOORS.values())[index % 4]
        messages = [*CONVERSATION[: 1 + index % 2], {"role": "user", "content": "the cat sat " * (index % 5 + 1)}]
        fields = {"max_tokens": 5 + index % 30, "seed": index // 8, **(AT_RANDOM if index % 3 else {})}
        asked.append((door, messages, index % 8 >= 4, fields))

    def run(request: Any) -> Told:
        door, messages, streams, fields = request
        return caller.ask(door, messages, streams=streams, **fields)

    alone = [run(request) for request in asked]
    before = caller.server.wait_until_idle()["decode"]
    with ThreadPoolExecutor(32) as crowd:
        assert list(crowd.map(run, asked)) == alone
    after = caller.server.wait_until_idle()["decode"]
    rows, plans = (after[name] - before[name] for name in ("rows", "plans"))
    assert rows > 2 * plans, "they were computed together"


# ---- the same prompts -------------------------------------------------------------------------------------------

CONVERSATIONS = {
    "one turn": TURNS[:1],
    "system": CONVERSATION[:2],
    "several turns": CONVERSATION,
    "two of one role": [*TURNS[:1], *TURNS[:1], *TURNS[1:2], *TURNS[1:2], *TURNS[:1]],
    "to go on from": TURNS[:2],
    "system in between": [*TURNS, *CONVERSATION[:1], *TURNS[:1]],
    "empty": [{"role": "user", "content": ""}],
}


def parts_of(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in (text[:4], text[4:])]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_has_the_tokens_that_the_template_gives(caller: Caller, messages: list[Any]):
    """By every surface, as text or as parts: counted before, used in the end, and shown by tokenize."""
    ids = caller.template.encode(messages)
    in_parts = [{**message, "content": parts_of(message["content"])} for message in messages]
    forms = {"native": [messages], "completions": [messages], "chat": [messages, in_parts]}
    forms["messages"] = forms["chat"]
    fields = {"max_tokens": 6, "seed": 2, **AT_RANDOM}
    told = [caller.ask(DOORS[name], form, streams=False, **fields) for name in DOORS for form in forms[name]]
    assert told == told[:1] * len(told)
    assert told[0].num_prompt == len(ids)
    assert caller.client.post("/v1/tokenize", json={"messages": messages}).json()["token_ids"] == ids
    for form in (messages, in_parts):
        body = {"model": caller.server.model_id, **_anthropic_body(form, ())}
        assert caller.client.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": len(ids)}


# ---- the same steps ---------------------------------------------------------------------------------------------


def test_requests_of_all_surfaces_share_a_prefill_and_every_decode_step(tmp_path: Path):
    """They wait behind one request that has all pages, and begin together when its client leaves."""
    num_tokens, messages = 12, TURNS[:1]
    with roomy_server(tmp_path, "--kv-pages", "1024", "--max-batch", "8") as caller, ThreadPoolExecutor(4) as crowd:
        fields = {"max_tokens": num_tokens, **AT_RANDOM}
        alone = caller.ask(DOORS["native"], messages, streams=False, **fields)
        before = caller.server.wait_until_idle()
        with held(caller):
            waiting = [crowd.submit(caller.ask, door, messages, streams=True, **fields) for door in DOORS.values()]
            during = caller.server.wait_for(lambda: (found := caller.server.metrics())["queued"] == 4 and found)
            assert (during["active"], during["pages"]["free"]) == (1, 0)
        assert [one.result() for one in waiting] == [alone] * 4
        after = caller.server.wait_until_idle()

    def more(kind: str, name: str, start: Any) -> int:
        return after[kind][name] - start[kind][name]

    assert more("prefill", "plans", during) == 1
    assert more("prefill", "chunks", during) == 4
    assert more("prefill", "rows", during) == 4 * alone.num_prompt
    # Steps of the one that held them have one row; the prefill has drawn each one's first token.
    assert more("decode", "rows", before) - more("decode", "plans", before) == 3 * (num_tokens - 1)


@contextmanager
def roomy_server(tmp_path: Path, *options: str) -> Iterator[Caller]:
    """A server whose context is so long that filling it takes seconds."""
    family = FAMILIES["chatml"]
    model = write_toy_artifact(
        tmp_path / "toy", chat_template=family.source, control=family.control, max_position_embeddings=16384
    )
    with serving(model, tmp_path / "log.txt", "--backend", "reference", *options) as server:
        caller = Caller(server, template_of(model))
        with caller.client:
            yield caller


@contextmanager
def held(caller: Caller) -> Iterator[None]:
    """While one request is computed that fills the context."""
    body = {"prompt": "the cat", "ignore_eos": True}
    with httpx.stream("POST", f"{caller.server.url}/v1/generate/stream", json=body, timeout=60) as reply:
        pieces = reply.iter_raw()
        next(pieces)
        yield
