"""Anthropic's messages, blocks and tools, and the conversation that they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from gateway.api_request import CacheMark, Conversation, Message, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from gateway.fields import (
    NOTHING_ELSE,
    TOOL_NAME,
    Body,
    CacheControl,
    Flag,
    JsonObject,
    Neutral,
    NeutralFalse,
    NeutralList,
    OnlyNeutral,
    OrText,
    Text,
    check_own_names,
    default_when_null,
    unicode_text,
)
from springtide.errors import InvalidRequest

MOST_CACHE_MARKS = 4
MAX_TOOL_NAME = 128
_ERROR = "Error: "
"""Before the result of a tool that has failed: chat templates have no other word for it."""


Name = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME), AfterValidator(unicode_text)]


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: NeutralList = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""
    """Nothing is signed here; whatever comes is taken."""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1), AfterValidator(unicode_text)]
    name: Name
    input: JsonObject
    cache_control: CacheControl | None = None
    caller: Annotated[Any, OnlyNeutral({"type": "direct"})] = None
    toolset_name: Neutral = None


def _refused(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None:
        raise ValueError("must be an object with a 'type'")
    raise ValueError(f"of type {str(kind)[:100]!r} is not supported here by this server")


_Refused = Annotated[Any, BeforeValidator(_refused), NOTHING_ELSE]


def _kind(*kinds: str) -> Discriminator:
    """By a block's type; whatever is none of `kinds` is refused by name."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if kind in kinds else "<refused>"

    return Discriminator(tag)


def _block(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


_RefusedBlock = Annotated[_Refused, Tag("<refused>")]
_TextBlock = Annotated[TextBlock, Tag("<text>")]
_TextOnly = Annotated[_TextBlock | _RefusedBlock, _kind("text")]
Texts = Annotated[list[_TextOnly], OrText(_block)]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[Texts, default_when_null([])] = Field(default_factory=list)
    is_error: Flag = False
    cache_control: CacheControl | None = None
    toolset_name: Neutral = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_BlockT = TypeVar("_BlockT", bound=Block)
_AnyBlock = Annotated[
    _TextBlock
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | _RefusedBlock,
    _kind("text", "thinking", "tool_use", "tool_result"),
]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_AnyBlock], OrText(_block)]


class CustomTool(Body):
    """A function of the client's."""

    type: Literal["custom"] | None = None
    name: Annotated[Name, Field(pattern=TOOL_NAME)]
    description: Annotated[Text, default_when_null("")] = ""
    input_schema: JsonObject
    strict: Flag = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Input is streamed as it is made, always."""
    allowed_callers: Annotated[Any, OnlyNeutral([], ["direct"])] = None
    defer_loading: NeutralFalse = None
    input_examples: NeutralList = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind in (None, "custom") else "<refused>"


ToolParam = Annotated[Annotated[CustomTool, Tag("<custom>")] | _RefusedBlock, Discriminator(_tool_kind)]


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: Flag = False


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: Flag = False


class OneChoice(Body):
    type: Literal["tool"]
    name: Text
    disable_parallel_tool_use: Flag = False


class NoChoice(Body):
    type: Literal["none"]


ToolChoiceParam = Annotated[
    Annotated[AutoChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[OneChoice, Tag("<tool>")]
    | Annotated[NoChoice, Tag("<none>")]
    | _RefusedBlock,
    _kind("auto", "any", "tool", "none"),
]


def conversation(
    system: Sequence[TextBlock],
    messages: Sequence[MessageParam],
    tools: Sequence[CustomTool],
    choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None,
    template_options: Mapping[str, Any],
) -> Conversation:
    """What they are to a chat template. Raises InvalidRequest, naming the field."""
    said = _Said()
    if system:
        said.system(system)
    for number, message in enumerate(messages):
        said.take(message, f"messages[{number}]")
    said.end()
    check_own_names([tool.name for tool in tools])
    goes_on = said.turns[-1].speaker is Speaker.ASSISTANT
    return Conversation(
        messages=tuple(turn.message for turn in said.turns),
        tools=tuple(_tool(tool) for tool in tools),
        tool_choice=_choice(choice, tools),
        template_options=template_options,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def marks(system: Sequence[TextBlock], messages: Sequence[MessageParam], tools: Sequence[CustomTool]) -> list[CacheControl]:
    """The marks of cache control, in the order of the prompt."""
    blocks = [block for message in messages for block in message.content if not isinstance(block, ThinkingBlock)]
    inner = [within for block in blocks for within in ([*block.content, block] if isinstance(block, ToolResultBlock) else [block])]
    return [marked.cache_control for marked in [*tools, *system, *inner] if marked.cache_control is not None]


@dataclass(slots=True)
class _Turn:
    """A message in the making."""

    speaker: Speaker
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    """For how long, and how many texts and calls come before each one's end."""
    answers: tuple[str, str] = ("", "")
    """Of a tool's: the id of the call, and the tool's name."""

    def say(self, blocks: Iterable[TextBlock | ToolUseBlock | ToolResultBlock]) -> None:
        for block in blocks:
            if isinstance(block, TextBlock):
                self.texts.append(block.text)
            if block.cache_control is not None:
                self.marks.append((block.cache_control.mark.ttl_s, len(self.texts), len(self.calls)))

    @property
    def message(self) -> Message:
        # What the assistant says goes on where it ended; what others say is a line each.
        between = "" if self.speaker is Speaker.ASSISTANT else "\n"
        call_id, name = self.answers
        marks = tuple(CacheMark(ttl_s, len(between.join(self.texts[:texts])), calls) for ttl_s, texts, calls in self.marks)
        return Message(self.speaker, between.join(self.texts), "".join(self.reasoning), tuple(self.calls), call_id, name, marks)


@dataclass(slots=True)
class _Said:
    """What has been said so far. Neighbours of the same speaker are one message, as Anthropic has it: many templates want speakers to take
    turns."""

    turns: list[_Turn] = field(default_factory=list)
    unanswered: dict[str, str] = field(default_factory=dict)
    """Names of tools that were called, by the calls' ids, whose results the user must say next."""
    role: str = ""
    where: str = ""
    """The last message, and whose it is."""

    def take(self, message: MessageParam, where: str) -> None:
        if message.role != self.role and (self.role, message.role) != ("assistant", "user"):
            self._all_answered(self.where if self.role == "user" else where)
        self.role, self.where = message.role, where
        match message.role:
            case "user":
                self._user(message.content, where)
            case "assistant":
                self._assistant(message.content, where)
            case "system":
                self.system([_only(block, TextBlock, where, number) for number, block in enumerate(message.content)])

    def end(self) -> None:
        """There are no more messages."""
        if self.role == "user":
            self._all_answered(self.where)
        elif self.unanswered:
            first = next(iter(self.unanswered))
            raise InvalidRequest(f"messages: the last one has a tool_use {first[:100]!r}, whose tool_result is missing", param="messages")

    def _all_answered(self, where: str) -> None:
        """What was called must have its results by the end of this message."""
        for call_id in self.unanswered:
            raise InvalidRequest(
                f"{where}: tool_use {call_id[:100]!r} of the message before has no tool_result here", param=f"{where}.content"
            )

    def system(self, blocks: Sequence[TextBlock]) -> None:
        turn = _Turn(Speaker.SYSTEM)
        turn.say(blocks)
        self.turns.append(turn)

    def _user(self, blocks: Sequence[Block], where: str) -> None:
        for number, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                self._turn(Speaker.USER).say([block])
                continue
            result = _only(block, ToolResultBlock, where, number)
            if result.tool_use_id not in self.unanswered:
                at = f"{where}.content[{number}].tool_use_id"
                message = f"{at}: the message before has no tool_use {result.tool_use_id[:100]!r}, or it has a tool_result already"
                raise InvalidRequest(message, param=at)
            answer = _Turn(Speaker.TOOL, answers=(result.tool_use_id, self.unanswered.pop(result.tool_use_id)))
            answer.say([*result.content, result])
            if result.is_error:
                answer.texts[:1] = [_ERROR + "".join(answer.texts[:1])]
            self.turns.append(answer)
        if not blocks:
            self._turn(Speaker.USER)

    def _assistant(self, blocks: Sequence[Block], where: str) -> None:
        turn = self._turn(Speaker.ASSISTANT)
        for number, block in enumerate(blocks):
            if isinstance(block, ThinkingBlock):
                turn.reasoning.append(block.thinking)
                continue
            if not isinstance(block, TextBlock):
                use = _only(block, ToolUseBlock, where, number)
                if use.id in self.unanswered:
                    at = f"{where}.content[{number}].id"
                    raise InvalidRequest(f"{at}: there is another tool_use {use.id[:100]!r} in this message", param=at)
                turn.calls.append(ToolCall(use.id, use.name, json.dumps(use.input, ensure_ascii=False)))
                self.unanswered[use.id] = use.name
                block = use
            turn.say([block])

    def _turn(self, speaker: Speaker) -> _Turn:
        """The last one, when it is this speaker's, or a further one."""
        if not self.turns or self.turns[-1].speaker is not speaker:
            self.turns.append(_Turn(speaker))
        return self.turns[-1]


def _only(block: Block, kind: type[_BlockT], where: str, number: int) -> _BlockT:
    if not isinstance(block, kind):
        at = f"{where}.content[{number}]"
        raise InvalidRequest(f"{at} of type {block.type!r} has no place in a message of this role", param=at)
    return block


def _tool(tool: CustomTool) -> Tool:
    mark = tool.cache_control.mark if tool.cache_control else None
    return Tool(tool.name, tool.description, tool.input_schema, tool.strict, mark)


def _choice(choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None, tools: Sequence[CustomTool]) -> ToolChoice:
    match choice:
        case None:
            return ToolChoice()
        case NoChoice():
            return ToolChoice(ToolMode.NONE)
        case AutoChoice():
            return ToolChoice(ToolMode.AUTO, parallel=not choice.disable_parallel_tool_use)
    if not tools:
        raise InvalidRequest(f"tool_choice of type {choice.type!r} needs tools, of which there are none", param="tool_choice")
    name = choice.name if isinstance(choice, OneChoice) else ""
    if name and name not in [tool.name for tool in tools]:
        raise InvalidRequest(f"tool_choice.name {name[:100]!r} is not the name of one of the tools", param="tool_choice.name")
    return ToolChoice(ToolMode.REQUIRED, name, not choice.disable_parallel_tool_use)
