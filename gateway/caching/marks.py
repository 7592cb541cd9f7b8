"""What of a prompt its marks want to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    findable_tokens: int
    """Of these, what that prompt itself finds in the pool: its last token is computed in any case, and that token's block with it."""
    ttl_s: float

    @classmethod
    def of(cls, num_shared: int, prompt_tokens: int, block_tokens: int, ttl_s: float) -> MarkedPrefix | None:
        """The full blocks of so many tokens of a prompt of so many; None: there is none."""
        tokens, findable = (num // block_tokens * block_tokens for num in (num_shared, min(num_shared, prompt_tokens - 1)))
        return cls(tokens, findable, ttl_s) if tokens else None


def marked_prefixes(
    render: Render, conversation: Conversation, prompt_ids: Sequence[int], keep_all_s: float, block_tokens: int
) -> tuple[MarkedPrefix, ...]:
    """The prefixes of the prompt that conversations which go on from the marks share with it, shortest first. One that another keeps for as
    long is left out, and so is what has no full block. A mark within a message ends there: how much comes before it is what the template
    writes alike where the message ends with it, which is less where it writes what follows (a text after a call) before."""
    found: list[MarkedPrefix] = []
    for end, ttl_s in sorted(_ttls(conversation, keep_all_s).items())[-MOST_MARKS:]:
        mark = MarkedPrefix.of(_shared(render, conversation, end, prompt_ids), len(prompt_ids), block_tokens, ttl_s)
        if mark is not None:
            found = [other for other in found if other.ttl_s > ttl_s and other.tokens < mark.tokens]
            found.append(mark)
    return tuple(found)


def written(marks: Sequence[MarkedPrefix], cached_tokens: int) -> tuple[KeptTokens, ...]:
    """What of the marked tokens was not found in the pool. Where all was found that a prompt can find, its last block counts as found."""
    begin, found = cached_tokens, []
    for mark in marks:
        if mark.tokens > begin and not 0 < mark.findable_tokens <= cached_tokens:
            found.append(KeptTokens(mark.ttl_s, mark.tokens - begin))
            begin = mark.tokens
    return tuple(found)


class _End(NamedTuple):
    """Where a mark ends: after so many messages, of the last of which only so much counts."""

    num_messages: int
    num_characters: int
    num_calls: int


def _ttls(conversation: Conversation, keep_all_s: float) -> dict[_End, float]:
    """How long what comes before each end, with all tools, is to be kept."""
    ttls: dict[_End, float] = {}
    messages = conversation.messages

    def mark(end: _End, ttl_s: float) -> None:
        ttls[end] = max(ttl_s, ttls.get(end, 0.0))

    def mark_whole(count: int, ttl_s: float) -> None:
        last = messages[count - 1] if count else None
        mark(_End(0, 0, 0) if last is None else _End(count, len(last.content), len(last.tool_calls)), ttl_s)

    # Templates write tools with the system's message, most of them after its text.
    num_system = next((number for number, message in enumerate(messages) if message.speaker is not Speaker.SYSTEM), len(messages))
    for tool in conversation.tools:
        if tool.cache_mark is not None:
            mark_whole(num_system, tool.cache_mark.ttl_s)
    for number, message in enumerate(messages, 1):
        for one in message.cache_marks:
            mark(_End(number, one.num_characters, one.num_calls), one.ttl_s)
    if keep_all_s:
        mark_whole(len(messages), keep_all_s)
    return ttls


def _shared(render: Render, conversation: Conversation, end: _End, prompt_ids: Sequence[int]) -> int:
    """How many tokens the prompt has in common with another that goes on from that end."""
    kept = conversation.messages[: end.num_messages]
    if kept:
        last = kept[-1]
        kept = (*kept[:-1], replace(last, content=last.content[: end.num_characters], tool_calls=last.tool_calls[: end.num_calls]))
    asked, answered = Message(Speaker.USER, "x"), Message(Speaker.ASSISTANT, "x")
    after_user = bool(kept) and kept[-1].speaker in (Speaker.USER, Speaker.TOOL)
    other = (*kept, answered, asked) if after_user else (*kept, asked)
    try:
        return common_length(prompt_ids, render(replace(conversation, messages=other, continue_final_message=False)))
    except InvalidRequest:
        return 0  # the template wants it otherwise: what is not sure to be shared is not kept
