"""What of a conversation is the beginning of every conversation that goes on from it: the part worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.api_request import Conversation, Message, Speaker
from springtide.errors import InvalidRequest

_TEXTS = ("x", "\nIs it so?")
"""What a continuation may say: a text that begins with a letter may become one token with what stands before it, another may not."""

Render = Callable[[Conversation], Sequence[int]]
"""The tokens of a conversation. Raises InvalidRequest for one that the template refuses."""


def stable_prefix(render: Render, conversation: Conversation) -> tuple[Sequence[int], int]:
    """The tokens of the conversation without what the template adds for an answer, and how many of them, from the first, every
    continuation begins with. Raises InvalidRequest when the template refuses the conversation.

    Templates are programs: some write the last message otherwise than the ones before, or add what a tokenizer joins with the text before.
    So continuations of every kind are rendered, and what they have in common counts.
    """
    alone = render(replace(conversation, add_generation_prompt=False, continue_final_message=False))
    stable = len(alone)
    for messages in _continuations(conversation.messages):
        try:
            continued = render(replace(conversation, messages=messages, add_generation_prompt=True, continue_final_message=False))
        except InvalidRequest:
            continue  # two users' messages in a row, say: nobody can send what the template refuses
        stable = common_length(alone[:stable], continued)
    return alone, stable


def _continuations(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    last = messages[-1].speaker
    found = [(*messages, Message(Speaker.USER, text)) for text in _TEXTS]
    if last in (Speaker.USER, Speaker.TOOL):
        found.append(messages)  # the answer comes at once
        found.append((*messages, Message(Speaker.ASSISTANT, _TEXTS[0]), Message(Speaker.USER, _TEXTS[0])))
    return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens, from the first, are the same."""
    length = min(len(one), len(other))
    if list(one[:length]) == list(other[:length]):
        return length
    return next(index for index in range(length) if one[index] != other[index])
