"""What of a prompt its marks want to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.api_request import Conversation, Message, Speaker
from gateway.caching.prefix import Render, common_length
from springtide.errors import InvalidRequest
from springtide.protocol.usage import KeptTokens

MOST_MARKS = 8
"""Of one request, and with each it is rendered once more; of further ones the last count."""


@dataclass(frozen=True, slots=True)
class MarkedPrefix:
    """So many tokens of a prompt, from its first, are to be kept for so long."""

    tokens: int
    """Of full blocks."""
    ttl_s: float


def marked_prefixes(
    render: Render, conversation: Conversation, prompt_ids: Sequence[int], keep_all_s: float, block_tokens: int
) -> tuple[MarkedPrefix, ...]:
    """The prefixes of the prompt that conversations which go on from the marks share with it, shortest first. One that another keeps for as
    long is left out, and so is what has no full block."""
    found: list[MarkedPrefix] = []
    for count, ttl_s in sorted(_ttls(conversation, keep_all_s).items())[-MOST_MARKS:]:
        shared = _shared(render, conversation, count, prompt_ids)
        tokens = shared // block_tokens * block_tokens
        if tokens:
            found = [other for other in found if other.ttl_s > ttl_s and other.tokens < tokens]
            found.append(MarkedPrefix(tokens, ttl_s))
    return tuple(found)


def written(marks: Sequence[MarkedPrefix], cached_tokens: int) -> tuple[KeptTokens, ...]:
    """What of the marked tokens was not found in the pool."""
    begin, found = cached_tokens, []
    for mark in marks:
        if mark.tokens > begin:
            found.append(KeptTokens(mark.ttl_s, mark.tokens - begin))
            begin = mark.tokens
    return tuple(found)


def _ttls(conversation: Conversation, keep_all_s: float) -> dict[int, float]:
    """How long the first so many messages, with all tools, are to be kept."""
    ttls: dict[int, float] = {}

    def mark(count: int, ttl_s: float) -> None:
        ttls[count] = max(ttl_s, ttls.get(count, 0.0))

    messages = conversation.messages
    # Templates write tools with the system's message, most of them after its text.
    num_system = next((number for number, message in enumerate(messages) if message.speaker is not Speaker.SYSTEM), len(messages))
    for tool in conversation.tools:
        if tool.cache_mark is not None:
            mark(num_system, tool.cache_mark.ttl_s)
    for number, message in enumerate(messages):
        if message.cache_mark is not None:
            mark(number + 1, message.cache_mark.ttl_s)
    if keep_all_s:
        mark(len(messages), keep_all_s)
    return ttls


def _shared(render: Render, conversation: Conversation, count: int, prompt_ids: Sequence[int]) -> int:
    """How many tokens the prompt has in common with another that goes on from its first `count` messages."""
    kept = conversation.messages[:count]
    asked, answered = Message(Speaker.USER, "x"), Message(Speaker.ASSISTANT, "x")
    after_user = bool(kept) and kept[-1].speaker in (Speaker.USER, Speaker.TOOL)
    other = (*kept, answered, asked) if after_user else (*kept, asked)
    try:
        return common_length(prompt_ids, render(replace(conversation, messages=other, continue_final_message=False)))
    except InvalidRequest:
        return 0  # the template wants it otherwise: what is not sure to be shared is not kept
