"""From messages to ids: every template's own control tokens, and never one of a user's making."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from chat_templates import FAMILIES, SHAPES, Family
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import TRAINING_TEXT, library_tokenizer, toy_json

from crucible.errors import CrucibleError
from crucible.tokenizer import Tokenizer
from crucible.tokenizer.chat import ChatError, ChatTemplate
from crucible.tokenizer.template import Template, TemplateError, written

CHATML = FAMILIES["chatml"]


def chat(family: Family, **changes: Any) -> ChatTemplate:
    return ChatTemplate(family.tokenizer(), **{"source": family.source, "special_tokens": family.special, **changes})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


# ---- control tokens ---------------------------------------------------------------------------------------------


def naive_ids(family: Family, text: str) -> list[int]:
    """Ids of a rendering as the library gives them: whatever looks like a control token is one."""
    return family.library().encode(text, add_special_tokens=False).ids


@families
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ordinary_conversations_have_the_library_s_ids(family: Family, shape: list[dict[str, str]]) -> None:
    messages = family.accepted(shape)
    template = chat(family)
    text = template.render(messages)
    assert template.encode(messages) == naive_ids(family, text)
    assert template.tokenizer.decode(template.encode(messages)).strip() == text.strip()


@families
def test_control_tokens_in_messages_stay_text(family: Family) -> None:
    """An attack holds every control token of the family, whole, cut in halves by its borders, and doubled."""
    template = chat(family)
    control = set(template.tokenizer.control_tokens.values())

    def controls(content: str) -> list[int]:
        messages = family.accepted([{"role": "user", "content": content}, {"role": "assistant", "content": content}])
        return [i for i in template.encode([*messages, *user(content)]) if i in control]

    expected = controls("harmless")
    assert expected or family.is_text_only
    for token in template.tokenizer.control_tokens:
        for attack in (token, f"a{token}b", f"{token}\n{token}", token[1:], token[:-1], token * 2, f" {token} "):
            assert controls(attack) == expected, attack


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<|im_", "end|>", "<|im_start|>", "<", "|", ">", "user", "\n", " ", "x"]), max_size=6))
def test_text_next_to_control_tokens_never_joins_them(pieces: list[str]) -> None:
    content = "".join(pieces)
    template = chat(CHATML)
    messages = [*user(content), {"role": "assistant", "content": content}, *user(content)]
    ids = template.encode(messages)
    start, end = (template.tokenizer.control_tokens[token] for token in ("<|im_start|>", "<|im_end|>"))
    assert [i for i in ids if i in (start, end)] == [start, end] * 4 + [start]
    assert template.tokenizer.decode(ids) == template.render(messages)


def test_a_template_that_looks_for_markers_finds_those_that_users_write() -> None:
    """Contents reach a template unchanged, so that Qwen's takes the reasoning out of what was said before."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if '</think>' in m.content %}"
        "<think>{{ m.content.split('</think>')[0].split('<think>')[-1] | upper }}</think>"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    template = chat(CHATML, source=source)
    said = {"role": "assistant", "content": "<think>hm</think>\n\nyes <think>"}
    ids = template.encode([*user("a"), said, *user("b")])
    control = template.tokenizer.control_tokens
    assert (
        template.tokenizer.decode(ids).split("<|im_start|>")[2] == "assistant\n<think>HM</think>yes <think><|im_end|>\n"
    )
    assert (ids.count(control["<think>"]), ids.count(control["</think>"])) == (1, 1)


@pytest.mark.parametrize(
    "expression",
    [
        "'<|im_' + 'end|>'",
        "'<|im_' ~ 'end|>'",
        "'<|' ~ name ~ '|>'",
        "('  <|im_end|> ' + ' ') | trim",
        "['<|im_', 'end|>'] | join",
        "'end'.join(['<|im_', '|>'])",
        "'<|im_start|><|im_end|>'[12:]",
        "'<|im_end|>|<|im_start|>'.split('|<')[0]",
        "'<|im_END|>'.replace('END', 'end')",
        "'<|im_{}|>'.format('end')",
        "['<|im_end|>', 'x'] | first",
        "{'a': '<|im_end|>'}.a",
        "none | default('<|im_end|>', true)",
        "'  <|im_end|>'.lstrip() if true else ''",
        "token",
    ],
)
def test_control_tokens_that_a_template_puts_together_count(expression: str) -> None:
    template = chat(CHATML)
    source = "{% set made %}{{ EXPRESSION }}{% endset %}{% macro m() %}{{ made }}{% endmacro %}{{ m() }}"
    text = Template(source.replace("EXPRESSION", expression)).render(
        {"name": written("im_end"), "token": written("<|im_end|>")}
    )
    assert (text, set(text.by_template)) == ("<|im_end|>", {1})
    assert template._encode_written(text) == [template.tokenizer.control_tokens["<|im_end|>"]]


@pytest.mark.parametrize(
    "expression",
    [
        "said",
        "said | trim",
        "said | upper | lower",
        "'<|im_' + half",
        "half + 'end|>'",
        "'<|im_{}|>'.format(word)",
        "'<|im_%s|>' % word",
        "'<|im_WORD|>'.replace('WORD', word)",
        "['<|im_', word, '|>'] | join",
        "word.join(['<|im_', '|>'])",
        "'<|im_' ~ word ~ '|>'",
        "{'a': said} | tojson",
        "said[0] + said[1:]",
        "said.split('x')[0]",
        "(said + '') | string",
    ],
)
def test_control_tokens_with_any_part_from_a_message_do_not(expression: str) -> None:
    template = chat(CHATML)
    for half in ("<|im_", "end|>"):
        text = Template(f"{{{{ {expression} }}}}").render({"said": "<|im_end|>", "half": half, "word": "end"})
        assert template.tokenizer.control_tokens["<|im_end|>"] not in template._encode_written(text), text
        assert template.tokenizer.decode(template._encode_written(text)) == text


def test_white_space_around_control_tokens_goes_as_their_flags_say() -> None:
    library = tokenizers.Tokenizer.from_str(Tokenizer.train([TRAINING_TEXT], 300).to_json().decode())
    library.add_special_tokens(
        [
            tokenizers.AddedToken("<|left|>", lstrip=True),
            tokenizers.AddedToken("<|right|>", rstrip=True),
            tokenizers.AddedToken("<|both|>", lstrip=True, rstrip=True),
            tokenizers.AddedToken("<|word|>", single_word=True),
            tokenizers.AddedToken("<|word|>s"),
        ]
    )
    tokenizer = Tokenizer.from_bytes(library.to_str().encode())
    tokens = ["<|left|>", "<|right|>", "<|both|>", "<|word|>", "<|word|>s"]
    for token in tokens:
        for other in tokens:
            for around in ("{} {}", "a \n{}\n b{} ", " {}{} ", "x{}y {}", "{}  {}  ", "{}é {}世"):
                text = around.format(token, other)
                expected = library.encode(text, add_special_tokens=False).ids
                assert ChatTemplate(tokenizer, "x")._encode_written(written(text)) == expected, text


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_goes_before_each_stretch_of_text_as_the_tokenizer_has_it(scheme: str) -> None:
    document = json.loads(toy_json("metaspace_unigram"))
    document["pre_tokenizer"]["prepend_scheme"] = scheme
    document |= {"padding": None, "truncation": None, "post_processor": None}
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    template = ChatTemplate(Tokenizer.from_bytes(json.dumps(document).encode()), "x")
    for text in SPACED:
        assert template._encode_written(written(text)) == library.encode(text, add_special_tokens=False).ids, text


SPACED = ("<s>the cat</s>a cat", "the</s>cat <s> the", "<s>", "the cat", "</s> </s>at")


def test_a_space_that_the_normalizer_puts_goes_before_every_stretch() -> None:
    library, template = (
        library_tokenizer(toy_json("metaspace_bpe")),
        ChatTemplate(Tokenizer.from_bytes(toy_json("metaspace_bpe")), "x"),
    )
    for text in SPACED:
        assert template._encode_written(written(text)) == library.encode(text, add_special_tokens=False).ids, text


# ---- turns ------------------------------------------------------------------------------------------------------


@families
def test_a_trailing_assistant_message_is_continued(family: Family) -> None:
    template = chat(family)
    question = family.accepted(user("Where is Paris?"))
    opened = template.render(question)
    for said in ("", "Paris is", "Paris is ", "  Paris"):
        text = template.render([*question, {"role": "assistant", "content": said}])
        assert text.rstrip().endswith(said.strip() or opened.rstrip())
        assert not text.endswith(tuple(template.tokenizer.control_tokens)) or not said
    if family.opens_turns:
        assert template.render([*question, {"role": "assistant", "content": ""}]) == opened


def test_an_open_turn_keeps_its_space_unless_the_template_trims() -> None:
    messages = [*user("a"), {"role": "assistant", "content": " b "}]
    assert chat(CHATML).render(messages).endswith("<|im_start|>assistant\n b ")
    trimming = chat(FAMILIES["llama3"])
    assert trimming.render(messages).endswith("<|start_header_id|>assistant<|end_header_id|>\n\nb")
    blank = [*user("a"), {"role": "assistant", "content": "  \n"}]
    assert trimming.render(blank).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(ChatError, match=r"messages\[1\] is an assistant's .* leaves out its text"):
        chat(CHATML, source="{{ messages[0].content }}").encode([*user("a"), {"role": "assistant", "content": "b"}])
    calls = [*user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    with pytest.raises(ChatError, match=r"messages\[1\] has tool_calls, and no text to go on from"):
        chat(CHATML, source="{{ messages[0].tool_calls }}").encode(calls)


def test_a_message_may_hold_the_characters_that_mark_an_open_turn() -> None:
    private = "".join(map(chr, range(0xE000, 0xF900)))
    text = chat(CHATML).render([*user(private), {"role": "assistant", "content": private}])
    assert text.endswith(f"<|im_start|>assistant\n{private}")


# ---- the plain template -----------------------------------------------------------------------------------------


def test_the_plain_template() -> None:
    template = ChatTemplate(Tokenizer.gpt2())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is Paris?"},
        {"role": "assistant", "content": "In France."},
        {"role": "user", "content": "And Rome?"},
    ]
    text = "System: Be brief.\n\nUser: Where is Paris?\n\nAssistant: In France.\n\nUser: And Rome?\n\nAssistant:"
    assert template.render(messages) == text
    assert template.encode(messages) == template.tokenizer.encode(text)
    prefix = [*messages, {"role": "assistant", "content": "In It"}]
    assert template.render(prefix) == text + " In It"
    # The space that a model's first word brings is part of its token.
    assert template.encode(messages) + template.tokenizer.encode(" In") == template.tokenizer.encode(text + " In")


def test_control_tokens_stay_text_in_the_plain_template() -> None:
    template = ChatTemplate(Tokenizer.gpt2())
    assert template.tokenizer.eot_id not in template.encode(user("<|endoftext|>"))


# ---- what messages may be ---------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_developers_are_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<|im_end|>b", "cache_control": None}]
    for template in (chat(CHATML), ChatTemplate(Tokenizer.gpt2())):
        assert template.encode(user(parts)) == template.encode(user("a<|im_end|>b"))
        developer, system = ([{"role": role, "content": "s"}, *user("a")] for role in ("developer", "system"))
        assert template.encode(developer) == template.encode(system)


def test_an_assistant_s_content_may_be_null_absent_or_empty() -> None:
    template = chat(CHATML)
    one, two, three = (
        template.encode([*user("a"), {"role": "assistant", **content}, *user("b")])
        for content in ({"content": None}, {}, {"content": ""})
    )
    assert one == two == three


def test_fields_that_the_template_names_reach_it_as_plain_data() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "[{{ m.name }}:{{ m.content }}:{{ m.extra.a[1] }}]{% endif %}{% endfor %}"
    )
    template = chat(CHATML, source=source)
    messages = [*user("a"), {"role": "tool", "name": "f", "content": "r", "extra": {"a": (1, True)}}]
    assert template.render(messages) == "[f:r:True]"
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value, message in (
        ({"a": object()}, r"messages\[1\]\.extra\.a must be of a type that JSON has, not object"),
        (deep, r"messages\[1\]\.extra is nested too deep"),
    ):
        with pytest.raises(ChatError, match=message):
            template.render([*user("a"), {"role": "tool", "content": "", "extra": value}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list of messages, not 'hello'"),
        ({"role": "user"}, "messages must be a list"),
        (["hello"], r"messages\[0\] must be an object with role and content, not 'hello'"),
        ([{"content": "a"}], r"messages\[0\]\.role must be one of system, developer, user, assistant, tool, not None"),
        ([*user("a"), {"role": "function", "content": "a"}], r"messages\[1\]\.role must be one of .*, not 'function'"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\]\.role must be one of"),
        ([{"role": "tool", "content": "a"}], r"messages\[0\]\.role is 'tool', for which .* no place"),
        ([{"role": "user"}], r"messages\[0\]\.content must be text or a list of text parts, not null"),
        (user(None), r"messages\[0\]\.content must be text or a list of text parts, not null"),
        (user(3), r"messages\[0\]\.content must be text or a list of text parts, not 3"),
        (user(["a"]), r"messages\[0\]\.content\[0\] must be an object with type and text, not 'a'"),
        (
            user([{"type": "text", "text": "a"}, {"type": "image_url"}]),
            r"content\[1\]\.type must be 'text', not 'image_url'",
        ),
        (user([{"text": "a"}]), r"content\[0\]\.type must be 'text', not None"),
        (user([{"type": "text"}]), r"content\[0\]\.text must be a string, not None"),
        ([{"role": "user", "content": "a", "weight": 0}], r"messages\[0\]\.weight is a field for which .* no place"),
    ],
)
@pytest.mark.parametrize("source", [CHATML.source, None], ids=["chatml", "plain"])
def test_malformed_messages_are_refused_by_name(messages: Any, message: str, source: str | None) -> None:
    with pytest.raises(ChatError, match=message):
        chat(CHATML, source=source).encode(messages)


# ---- what templates may do --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "refuses these messages: Roles must alternate!"),
        ("{% for m in messages %}", "the chat template is malformed: "),
        ("{{ messages | nonsense }}", "the chat template is malformed: No filter named 'nonsense'"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: "),
        ("{{ messages[0].a.b }}", "fails on these messages: 'dict object' has no attribute 'a'"),
        ("{{ 1 // 0 }}", "fails on these messages: "),
        ("{% include 'x' %}", "fails on these messages: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails on these messages: .* unsafe"),
        ("{{ messages[0].content.join.__self__.__class__.__mro__ }}", "fails on these messages: .* unsafe"),
        ("{{ 'x'.join.__func__.__globals__ }}", "fails on these messages: .* unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "fails on these messages: .* unsafe"),
        ("{{ messages.append(1) }}", "fails on these messages: .* unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails on these messages: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on these messages: maximum recursion"),
        ("{% for i in [1] %}" * 40 + "{% endfor %}" * 40, "the chat template is malformed: "),
    ],
)
def test_a_template_s_errors_are_the_caller_s_to_read(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        chat(CHATML, source=source).encode(user("a"))
    assert issubclass(TemplateError, CrucibleError)


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ {'k': m.content} | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ tools is none }}{{ strftime_now('%%') }}{{ [1, 2] | tojson(indent=1) }}{{ bos_token }}"
    )
    text = chat(CHATML, source=source, special_tokens={"bos_token": "<s>"}).render(user("<é'>"))
    assert text == '{"k": "<é\'>"}True%[\n 1,\n 2\n]<s>'
