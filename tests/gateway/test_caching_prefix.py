"""What of a conversation is kept: the beginning of whatever goes on from it, by the demo model's own template and tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import ApiRequest, CacheMark, CacheUse, Conversation, Message, Speaker, Texts, Tool, ToolCall, ToolChoice, ToolMode
from gateway.caching.context import Content, canonical, content_bytes, content_from
from gateway.caching.marks import MarkedPrefix, marked_prefixes, written
from gateway.caching.prefix import common_length, stable_prefix
from gateway.prepare import Origin, Preparer
from springtide.errors import InvalidRequest
from springtide.protocol.usage import KeptTokens

BLOCK_TOKENS = 16
SYSTEM = Message(Speaker.SYSTEM, "You are the keeper of a lighthouse, and you answer in a few words. " * 4)
ASKED, ANSWERED = Message(Speaker.USER, "How high is the tide at noon? " * 8), Message(Speaker.ASSISTANT, "Two metres. " * 8)


def marked(message: Message, ttl_s: float) -> Message:
    """At its end."""
    return replace(message, cache_marks=(CacheMark(ttl_s, len(message.content), len(message.tool_calls)),))


messages = st.builds(
    Message, st.sampled_from([Speaker.USER, Speaker.ASSISTANT, Speaker.SYSTEM]), st.text(st.characters(codec="utf-8"), max_size=40)
)


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer) -> Preparer:
    return Preparer("m", 4000, 49152, tokenizer, block_tokens=BLOCK_TOKENS)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=st.lists(messages, min_size=1, max_size=4), more=st.lists(messages, min_size=1, max_size=3))
def test_whatever_goes_on_from_it_begins_with_it(preparer: Preparer, begin: list[Message], more: list[Message]) -> None:
    tokens, stable = stable_prefix(preparer.rendered, Conversation(tuple(begin)))
    continued = preparer.rendered(Conversation((*begin, *more)))
    # The template puts a message of its own before a first one that is not the system's; all continuations have it.
    assert common_length(tokens[:stable], continued) == stable


def test_all_of_it_is_kept_where_the_template_writes_messages_one_by_one(preparer: Preparer) -> None:
    for conversation in (Conversation((SYSTEM,)), Conversation((SYSTEM, ASKED)), Conversation((SYSTEM, ASKED, ANSWERED))):
        tokens, stable = stable_prefix(preparer.rendered, conversation)
        assert stable == len(tokens)


def test_what_a_template_changes_later_is_not_kept() -> None:
    def render(conversation: Conversation) -> Sequence[int]:
        """Marks the last message, as templates do that leave out earlier reasoning."""
        *before, last = conversation.messages
        return [token for message in before for token in (1, len(message.content))] + [2, len(last.content)]

    tokens, stable = stable_prefix(render, Conversation((SYSTEM, ASKED, ANSWERED)))
    assert list(tokens[stable:]) == [2, len(ANSWERED.content)] and stable == 4


def test_a_template_that_refuses_a_continuation_is_not_asked_for_it() -> None:
    def render(conversation: Conversation) -> Sequence[int]:
        speakers = [message.speaker for message in conversation.messages]
        if any(one is other for one, other in itertools.pairwise(speakers)):
            raise InvalidRequest("roles must alternate", param="messages")
        return [len(message.content) for message in conversation.messages]

    assert stable_prefix(render, Conversation((ASKED,)))[1] == 1
    with pytest.raises(InvalidRequest):
        stable_prefix(render, Conversation((ASKED, ASKED)))


def test_a_content_is_the_same_when_it_is_read_again() -> None:
    tools = (Tool("tide", "Its height.", {"type": "object", "properties": {"at": {"enum": ["noon"]}}}, strict=True),)
    choice = ToolChoice(ToolMode.REQUIRED, "tide", parallel=False)
    conversation = Conversation((SYSTEM, ASKED, ANSWERED), tools, choice, template_options={"enable_thinking": False})
    read = content_from(content_bytes(Content(conversation, (1, 2, 3))))
    assert canonical(read.conversation) == canonical(conversation) and read.token_ids == (1, 2, 3)
    assert read.conversation.tool_choice == choice
    other = replace(conversation, messages=tuple(marked(message, 300.0) for message in conversation.messages))
    assert canonical(other) == canonical(conversation), "marks make no other conversation"


def marks(preparer: Preparer, *said: Message, keep_all_s: float = 0.0) -> tuple[MarkedPrefix, ...]:
    conversation = Conversation(said)
    prompt = preparer.tokens(ApiRequest("m", conversation))[0]
    return marked_prefixes(preparer.rendered, conversation, prompt, keep_all_s, BLOCK_TOKENS)


def test_a_mark_keeps_what_comes_before_its_end(preparer: Preparer) -> None:
    system = len(preparer.rendered(Conversation((SYSTEM,), add_generation_prompt=False)))
    (mark,) = marks(preparer, marked(SYSTEM, 300.0), ASKED)
    assert mark == MarkedPrefix.of(system, system + 1, BLOCK_TOKENS, 300.0)
    hour, minutes = marks(preparer, marked(SYSTEM, 3600.0), marked(ASKED, 300.0))
    assert hour.tokens == mark.tokens < minutes.tokens and (hour.ttl_s, minutes.ttl_s) == (3600.0, 300.0)
    (longest,) = marks(preparer, marked(SYSTEM, 300.0), marked(ASKED, 300.0))
    assert longest == minutes, "what another keeps for as long needs no mark"
    assert marks(preparer, SYSTEM, ASKED, keep_all_s=300.0) == (minutes,)
    assert [mark.tokens for mark in marks(preparer, marked(Message(Speaker.USER, "Hi"), 9.0))] in ([], [BLOCK_TOKENS])
    assert marks(preparer, SYSTEM, ASKED) == ()


def test_a_mark_within_a_message_keeps_what_comes_before_it(preparer: Preparer) -> None:
    document, first, second = ANSWERED.content * 6, "What is the tide at noon?" * 4, "And when is it high?" * 4

    def kept(question: str, **message: Any) -> MarkedPrefix:
        said = Message(Speaker.USER, f"{document}\n{question}", cache_marks=(CacheMark(300.0, len(document)),), **message)
        (mark,) = marks(preparer, SYSTEM, said)
        return mark

    alone = preparer.rendered(Conversation((SYSTEM, Message(Speaker.USER, document)), add_generation_prompt=False))
    assert kept(first) == kept(second), "what comes after it is no part of it"
    assert len(alone) - 2 * BLOCK_TOKENS < kept(first).tokens < len(alone)
    whole = Message(Speaker.USER, f"{document}\n{first}", cache_marks=(CacheMark(3600.0, len(document)), CacheMark(300.0, 9999)))
    hour, minutes = marks(preparer, SYSTEM, whole)
    assert hour == replace(kept(first), ttl_s=3600.0) and minutes.tokens > hour.tokens


def test_a_mark_after_a_call_counts_where_the_template_writes_no_text_before_the_call() -> None:
    """A template that writes a message's text, then its calls."""

    def render(conversation: Conversation) -> Sequence[int]:
        return [token for message in conversation.messages for token in (1, *message.content.encode(), *(2 for _ in message.tool_calls), 3)]

    def kept(mark: CacheMark) -> int:
        calls = (ToolCall("a", "tide", "{}"), ToolCall("b", "tide", "{}"))
        conversation = Conversation((Message(Speaker.ASSISTANT, "abcdef", tool_calls=calls, cache_marks=(mark,)),))
        return sum(mark.tokens for mark in marked_prefixes(render, conversation, render(conversation), 0.0, 1))

    assert kept(CacheMark(9.0, 6, 1)) == 1 + 6 + 1 and kept(CacheMark(9.0, 6, 2)) == 1 + 6 + 2 + 1, "the whole message"
    assert kept(CacheMark(9.0, 3, 1)) == 1 + 3, "text that follows the call is written before it"


def test_what_is_written_is_what_was_not_found() -> None:
    kept = (MarkedPrefix(64, 64, 3600.0), MarkedPrefix(160, 160, 300.0))
    assert written(kept, 0) == (KeptTokens(3600.0, 64), KeptTokens(300.0, 96))
    assert written(kept, 32) == (KeptTokens(3600.0, 32), KeptTokens(300.0, 96))
    assert written(kept, 100) == (KeptTokens(300.0, 60),)
    assert written(kept, 160) == ()


def test_of_a_prompt_that_is_marked_to_its_end_the_last_block_is_not_written_again(preparer: Preparer) -> None:
    def kept(num_tokens: int, cached: int) -> int:
        request = ApiRequest("m", Texts((tuple(range(num_tokens)),)), cache=CacheUse(keep_all_s=300.0))
        (marks,) = preparer.prepared(request, Origin("r", 0.0)).marks
        return sum(one.tokens for one in written(marks, cached))

    whole, cut = 4 * BLOCK_TOKENS, 3 * BLOCK_TOKENS
    assert (kept(whole, 0), kept(whole, cut)) == (whole, 0), "its last token is computed anew, and its block with it"
    assert kept(whole, cut - BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    assert (kept(whole + 1, cut), kept(whole + 1, whole)) == (BLOCK_TOKENS, 0)


def test_a_request_that_names_a_cache_is_not_run_without_it(preparer: Preparer) -> None:
    with pytest.raises(InvalidRequest, match="cannot be named here"):
        preparer.prepared(ApiRequest("m", Conversation((ASKED,)), cache=CacheUse(cache_id="cache-1")), Origin("r", 0.0))
