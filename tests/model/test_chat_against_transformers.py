"""Ids of conversations against `transformers.apply_chat_template`, for the formats of well-known families."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import FAMILIES, SHAPES, Family
from transformers import PreTrainedTokenizerFast

from crucible.tokenizer.chat import ChatTemplate

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def both(family: Family, messages: Any) -> tuple[list[int], list[int]]:
    """Ours and theirs; a trailing assistant message is continued."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=family.library(), **family.special)
    is_open = messages[-1]["role"] == "assistant"
    expected = theirs.apply_chat_template(
        messages,
        chat_template=family.source,
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
        return_dict=False,
    )
    return ChatTemplate(family.tokenizer(), family.source, family.special).encode(messages), expected


@families
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ordinary_conversations(family: Family, shape: list[dict[str, str]]) -> None:
    ours, theirs = both(family, family.accepted(shape))
    assert ours == theirs


@families
def test_control_tokens_in_messages_are_what_differs(family: Family) -> None:
    """The comparison can fail: theirs, by default, takes a user's control tokens for real ones."""
    ours, theirs = both(family, [{"role": "user", "content": f"a{family.control[-1]}b"}])
    assert ours != theirs
    assert len(ours) > len(theirs)
