"""Items of the Responses API, in the one form in which they are stored and shown, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from gateway.api_request import Message, Speaker, ToolCall
from gateway.bodies import explained
from gateway.fields import Body, Neutral, NeutralFalse, Text, json_value, unicode_text
from gateway.openai.messages import PromptCacheBreakpoint, breakpoint_marks, breakpoint_ttl_s
from springtide.errors import InvalidRequest

Item = dict[str, Any]
"""An item as the API shows it; without `id` until it has a place in a response."""

MAX_ID_LENGTH = 256
_SPEAKERS = {"system": Speaker.SYSTEM, "developer": Speaker.SYSTEM, "user": Speaker.USER, "assistant": Speaker.ASSISTANT}
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    type: Literal["input_text"]
    text: Text
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class OutputText(Body):
    type: Literal["output_text"]
    text: Text
    annotations: Annotated[list[Any], AfterValidator(json_value)] | None = None
    logprobs: Annotated[list[Any], AfterValidator(json_value)] | None = None


class Refusal(Body):
    type: Literal["refusal"]
    refusal: Text


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(Body):
    type: Literal["summary_text"]
    text: Text


class DirectCaller(Body):
    type: Literal["direct"]


_TEXT_PARTS: dict[str, type[InputText | OutputText | Refusal]] = {"input_text": InputText, "output_text": OutputText, "refusal": Refusal}


def _content(value: Any) -> list[Item]:
    """The parts of a message's content, which may be given as a text."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": unicode_text(value)}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    parts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        model = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise ValueError(f"part {number} is of type {kind!r:.100}, which is not served; this model reads {', '.join(_TEXT_PARTS)}")
        parts.append(model.model_validate(part).model_dump(exclude_none=True))
    return parts


def _output(value: Any) -> str:
    if isinstance(value, str):
        return unicode_text(value)
    parts = _content(value)
    return "\n".join(_part_text(part) for part in parts)


_GivenContent = str | list[InputText | OutputText | Refusal]
Content = Annotated[Any, BeforeValidator(_content, json_schema_input_type=_GivenContent)]
"""After validation the parts as JSON."""


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: ItemId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def item(self) -> Item:
        content = self.content
        if self.role == "assistant":
            content = [_as_output(part) for part in content]
        shown = {"type": "message", "role": self.role, "content": content, "status": self.status or "completed"}
        return shown if self.phase is None else {**shown, "phase": self.phase}


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: ItemId
    name: ItemId
    arguments: Text
    id: ItemId | None = None
    status: Status | None = None
    caller: DirectCaller | None = None
    namespace: Neutral = None
    async_: NeutralFalse = Field(None, alias="async")

    def item(self) -> Item:
        fields = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", **fields, "status": self.status or "completed"}


class FunctionCallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: Annotated[str, BeforeValidator(_output, json_schema_input_type=_GivenContent)]
    id: ItemId | None = None
    status: Status | None = None
    name: str | None = None
    caller: DirectCaller | None = None
    namespace: Neutral = None

    def item(self) -> Item:
        return {"type": "function_call_output", "call_id": self.call_id, "output": self.output, "status": self.status or "completed"}


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    id: ItemId | None = None
    status: Status | None = None
    encrypted_content: Neutral = None

    def item(self) -> Item:
        summary = [part.model_dump() for part in self.summary]
        content = [part.model_dump() for part in self.content or ()]
        return {"type": "reasoning", "summary": summary, "content": content, "status": self.status or "completed"}


class ItemReference(Body):
    type: Literal["item_reference"] | None = "item_reference"
    id: ItemId

    def item(self) -> Item:
        return {"type": "item_reference"}


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference
_KINDS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
Given = str | list[InputItem] | None
"""What a request's input may be."""


def input_items(value: Any, name: str = "input") -> tuple[Item, ...]:
    """The items of a request's input, which may be given as a text. Raises InvalidRequest, naming the item and its field."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (MessageItem(role="user", content=value).item(),) if value else ()
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a string or a list of items", param=name, code="invalid_value")
    return tuple(_item(entry, f"{name}[{number}]") for number, entry in enumerate(value))


def _item(value: Any, name: str) -> Item:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name, code="invalid_value")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value else "item_reference"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        message = f"{name}: items of type {str(kind)[:100]!r} are not served; these are: {', '.join(_KINDS)}"
        raise InvalidRequest(message, param=f"{name}.type", code="unsupported_item")
    try:
        given = model.model_validate(value)
    except ValidationError as error:
        invalid = explained(error.errors(include_url=False)[0], name)
    else:
        return given.item() if given.id is None else {"id": given.id, **given.item()}
    # From out here: the original would keep the whole item for as long as this error is known to anybody.
    raise invalid


def _as_output(part: Item) -> Item:
    """A part of the assistant's message as the API shows it."""
    if part["type"] == "refusal":
        return part
    return {"type": "output_text", "text": part["text"], "annotations": part.get("annotations") or [], "logprobs": []}


def _part_text(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


# ---- ids ----


@dataclass(frozen=True, slots=True)
class ItemIds:
    """The ids of a response's items, its input's first. Each says whose it is and which one: no index of items is kept."""

    response_id: str

    def of(self, kind: str, number: int) -> str:
        return f"{_ID_PREFIXES[kind]}_{self.response_id.partition('_')[2]}_{number}"

    def named(self, items: Iterable[Item]) -> list[Item]:
        """The input items, from the first, each with an id: its own where the client gave one."""
        return [item if "id" in item else {"id": self.of(item["type"], number), **item} for number, item in enumerate(items)]


def response_of(item_id: str) -> str | None:
    """The id of the response that an item is of; None when it is no id of ours."""
    parts = item_id.split("_")
    return f"resp_{parts[1]}" if len(parts) == 3 and parts[2].isdecimal() else None


# ---- the conversation ----


@dataclass(slots=True)
class _Turn:
    """What the assistant says before somebody else does: reasoning, then text, then calls."""

    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        """Whether the item goes on with it, in this order."""
        match item:
            case {"type": "reasoning"}:
                return self.reasoning is None and self.content is None and not self.calls
            case {"type": "message", "role": "assistant"}:
                return self.content is None and not self.calls
        return bool(item["type"] == "function_call")

    def add(self, item: Item) -> None:
        if item["type"] == "reasoning":
            self.reasoning = "".join(part["text"] for part in item["content"] or item["summary"])
        elif item["type"] == "function_call":
            self.calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        else:
            self.content = "".join(map(_part_text, item["content"]))

    def whole(self) -> Message:
        return Message(Speaker.ASSISTANT, self.content or "", reasoning=self.reasoning or "", tool_calls=tuple(self.calls))


def conversation_of(items: Sequence[Item], name: str = "input") -> list[Message]:
    """The messages that items make: what the assistant thought, said and called stands in one message, as it was generated. Raises
    InvalidRequest for the answer to a call that there was not."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    turn: _Turn | None = None
    for item in items:
        if turn is not None and not turn.takes(item):
            messages.append(turn.whole())
            turn = None
        kind = item["type"]
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            turn = turn or _Turn()
            turn.add(item)
            if kind == "function_call":
                names[item["call_id"]] = item["name"]
        elif kind == "message":
            messages.append(_message(item))
        else:
            messages.append(_tool_message(item, names, name))
    return messages if turn is None else [*messages, turn.whole()]


def _message(item: Item) -> Message:
    parts = [(_part_text(part), part.get("prompt_cache_breakpoint")) for part in item["content"]]
    marks = breakpoint_marks((text, breakpoint_ttl_s(mark.get("ttl")) if mark is not None else None) for text, mark in parts)
    return Message(_SPEAKERS[item["role"]], "\n".join(text for text, _ in parts), cache_marks=marks)


def _tool_message(item: Item, names: dict[str, str], name: str) -> Message:
    call_id = item["call_id"]
    if call_id not in names:
        message = f"{name}: no function_call with call_id {call_id[:100]!r} comes before its function_call_output"
        raise InvalidRequest(message, param=name, code="unknown_call_id")
    return Message(Speaker.TOOL, item["output"], tool_call_id=call_id, name=names[call_id])
