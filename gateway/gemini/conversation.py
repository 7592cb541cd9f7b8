"""Gemini's contents, parts and tools, and the conversation that they are."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from gateway.api_request import Conversation, Message, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from gateway.fields import (
    TOOL_NAME,
    Body,
    Flag,
    JsonObject,
    Neutral,
    NeutralFalse,
    NeutralList,
    NeutralObject,
    OnlyNeutral,
    Text,
    check_own_names,
    default_when_null,
    json_value,
    unicode_text,
)
from gateway.gemini.schema import json_schema
from springtide.errors import InvalidRequest

MAX_FUNCTION_NAME = 128
Name = Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME), AfterValidator(unicode_text)]


class GeminiBody(Body):
    """Its fields are in camelCase, or in snake_case: the JSON of protocol buffers takes both, and Google's own client sends both."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


def upper(value: Any) -> Any:
    """Names of enumerations come in either case."""
    return value.upper() if isinstance(value, str) else value


class FunctionCall(GeminiBody):
    id: Text | None = None
    name: Name
    args: Annotated[JsonObject, default_when_null({})] = Field(default_factory=dict)
    partial_args: NeutralList = None
    will_continue: NeutralFalse = None


class FunctionResponse(GeminiBody):
    id: Text | None = None
    name: Name
    response: Annotated[JsonObject, default_when_null({})] = Field(default_factory=dict)
    parts: NeutralList = None
    will_continue: NeutralFalse = None
    scheduling: Neutral = None


class Part(GeminiBody):
    """One of `text`, `functionCall` and `functionResponse`."""

    text: Text | None = None
    thought: Flag = False
    thought_signature: Text | None = None
    """Nothing is signed here; whatever comes is taken."""
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Neutral = None
    file_data: Neutral = None
    executable_code: Neutral = None
    code_execution_result: Neutral = None
    tool_call: Neutral = None
    tool_response: Neutral = None
    video_metadata: Neutral = None
    media_resolution: Neutral = None
    part_metadata: NeutralObject = None


class Content(GeminiBody):
    role: Literal["user", "model", "function", "tool", "system"] | None = None
    """None: the user's. Of a system instruction it says nothing."""
    parts: Annotated[list[Part], default_when_null([])] = Field(default_factory=list)


def _schema(value: Any) -> Any:
    return None if value is None else json_schema(json_value(value))


class FunctionDeclaration(GeminiBody):
    name: Annotated[Name, Field(pattern=TOOL_NAME)]
    description: Annotated[Text, default_when_null("")] = ""
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_schema)] = None
    """After validation a JSON schema."""
    parameters_json_schema: JsonObject | None = None
    response: dict[str, Any] | None = None
    """What the function returns: chat templates have no place for it."""
    response_json_schema: dict[str, Any] | None = None
    behavior: Annotated[Any, OnlyNeutral("UNSPECIFIED", "BLOCKING")] = None


class ToolParam(GeminiBody):
    function_declarations: Annotated[list[FunctionDeclaration], default_when_null([])] = Field(default_factory=list)
    google_search: Neutral = None
    google_search_retrieval: Neutral = None
    google_maps: Neutral = None
    code_execution: Neutral = None
    url_context: Neutral = None
    computer_use: Neutral = None
    file_search: Neutral = None
    retrieval: Neutral = None
    mcp_servers: NeutralList = None


class FunctionCallingConfig(GeminiBody):
    mode: Annotated[Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None, BeforeValidator(upper)] = None
    allowed_function_names: Annotated[list[Text], default_when_null([])] = Field(default_factory=list)
    stream_function_call_arguments: NeutralFalse = None


class ToolConfig(GeminiBody):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Neutral = None
    include_server_side_tool_invocations: NeutralFalse = None


def conversation(
    contents: Sequence[Content],
    system: Content | None = None,
    tools: Sequence[ToolParam] = (),
    config: ToolConfig | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> Conversation:
    """What they are to a chat template. Raises InvalidRequest, naming the field."""
    said = _Said()
    if system is not None:
        said.system(system)
    for number, content in enumerate(contents):
        said.take(content, f"contents[{number}]")
    goes_on = bool(said.turns) and said.turns[-1].speaker is Speaker.ASSISTANT
    if goes_on and said.turns[-1].calls:
        raise InvalidRequest("contents: the last one calls functions, whose functionResponse parts are missing", param="contents")
    offered, choice = _tools(tools, config.function_calling_config if config is not None else None)
    return Conversation(
        messages=tuple(turn.message for turn in said.turns),
        tools=offered,
        tool_choice=choice,
        template_options=template_options or {},
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


@dataclass(slots=True)
class _Turn:
    """A message in the making."""

    speaker: Speaker
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answers: tuple[str, str] = ("", "")
    """Of a function's: the id of the call, and the function's name."""

    @property
    def message(self) -> Message:
        # What the model says comes back in the pieces in which it was streamed; what others say is a line each.
        between = "" if self.speaker is Speaker.ASSISTANT else "\n"
        call_id, name = self.answers
        return Message(self.speaker, between.join(self.texts), "".join(self.reasoning), tuple(self.calls), call_id, name)


@dataclass(slots=True)
class _Said:
    """What has been said so far. Neighbours of the same speaker are one message."""

    turns: list[_Turn] = field(default_factory=list)
    unanswered: dict[str, ToolCall] = field(default_factory=dict)
    """By their ids."""
    of_function: defaultdict[str, deque[str]] = field(default_factory=lambda: defaultdict(deque))
    """The ids of its calls, in their order, some of which are answered."""
    num_calls: int = 0

    def system(self, content: Content) -> None:
        turn = _Turn(Speaker.SYSTEM)
        for number, part in enumerate(content.parts):
            turn.texts.append(_text(part, f"systemInstruction.parts[{number}]"))
        self.turns.append(turn)

    def take(self, content: Content, where: str) -> None:
        if content.role == "system":
            raise InvalidRequest(f"{where}.role must be 'user' or 'model'; systemInstruction is for the system's", param=f"{where}.role")
        for number, part in enumerate(content.parts):
            at = f"{where}.parts[{number}]"
            if part.function_response is not None:
                self._response(part, at, content.role)
            elif content.role == "model":
                self._model(part, at)
            else:
                self._turn(Speaker.USER).texts.append(_text(part, at))

    def _response(self, part: Part, at: str, role: str | None) -> None:
        response = part.function_response
        assert response is not None
        if role == "model" or part.text is not None or part.function_call is not None:
            raise InvalidRequest(f"{at}.functionResponse must be the only thing in its part, and not the model's", param=at)
        call = self._call_of(response)
        if call is None:
            raise InvalidRequest(f"{at}.functionResponse answers no functionCall of the model's of that name and id", param=at)
        del self.unanswered[call.call_id]
        text = json.dumps(response.response, ensure_ascii=False)
        self.turns.append(_Turn(Speaker.TOOL, [text], answers=(call.call_id, response.name)))

    def _call_of(self, response: FunctionResponse) -> ToolCall | None:
        """The call that it answers. Ids are optional: without, answers come in the order of the calls of the same function."""
        if response.id:
            call = self.unanswered.get(response.id)
            return call if call is not None and call.name == response.name else None
        waiting = self.of_function[response.name]
        while waiting:
            if (call := self.unanswered.get(waiting.popleft())) is not None:
                return call
        return None

    def _model(self, part: Part, at: str) -> None:
        turn = self._turn(Speaker.ASSISTANT)
        if part.function_call is None:
            (turn.reasoning if part.thought else turn.texts).append(_text(part, at))
            return
        if part.text is not None:
            raise InvalidRequest(f"{at} has both text and functionCall; they are a part each", param=at)
        call = part.function_call
        made = ToolCall(call.id or f"call-{self.num_calls}", call.name, json.dumps(call.args, ensure_ascii=False))
        if made.call_id in self.unanswered:
            raise InvalidRequest(f"{at}.functionCall.id: a functionCall before it, which has no functionResponse yet, has it too", param=at)
        self.num_calls += 1
        self.unanswered[made.call_id] = made
        self.of_function[made.name].append(made.call_id)
        turn.calls.append(made)

    def _turn(self, speaker: Speaker) -> _Turn:
        """The last one, when it is this speaker's, or a further one."""
        if not self.turns or self.turns[-1].speaker is not speaker:
            self.turns.append(_Turn(speaker))
        return self.turns[-1]


def _text(part: Part, at: str) -> str:
    if part.text is None and part.thought_signature is None:
        raise InvalidRequest(f"{at} has neither text nor anything else that this server supports in this place", param=at)
    if part.function_call is not None:
        raise InvalidRequest(f"{at}.functionCall is the model's to make", param=at)
    return part.text or ""


def _tools(tools: Sequence[ToolParam], config: FunctionCallingConfig | None) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Those that the model is told of, and which of them it calls. Of those that it may not call it is not told."""
    declared = [declaration for tool in tools for declaration in tool.function_declarations]
    for declaration in declared:
        if declaration.parameters is not None and declaration.parameters_json_schema is not None:
            at = f"tools: {declaration.name[:100]!r} has both parameters and parametersJsonSchema"
            raise InvalidRequest(f"{at}; one of them is enough", param="tools")
    check_own_names([declaration.name for declaration in declared])
    names = {declaration.name for declaration in declared}
    mode = config.mode if config is not None else None
    allowed = config.allowed_function_names if config is not None else []
    field_name = "toolConfig.functionCallingConfig"
    if allowed and mode not in ("ANY", "VALIDATED"):
        raise InvalidRequest(f"{field_name}.allowedFunctionNames may only be set with the modes ANY and VALIDATED", param=field_name)
    if unknown := [name for name in allowed if name not in names]:
        raise InvalidRequest(f"{field_name}.allowedFunctionNames: there is no function {unknown[0][:100]!r}", param=field_name)
    if mode == "ANY" and not declared:
        raise InvalidRequest(f"{field_name}.mode ANY needs functions, of which there are none", param=field_name)
    wanted = frozenset(allowed) or names
    told = [declaration for declaration in declared if declaration.name in wanted]
    modes = {"ANY": ToolMode.REQUIRED, "NONE": ToolMode.NONE}
    strict = mode == "VALIDATED"
    return tuple(_tool(declaration, strict) for declaration in told), ToolChoice(modes.get(mode or "", ToolMode.AUTO))


def _tool(declaration: FunctionDeclaration, strict: bool) -> Tool:
    parameters = declaration.parameters if declaration.parameters is not None else declaration.parameters_json_schema
    return Tool(declaration.name, declaration.description, parameters or {"type": "object", "properties": {}}, strict)
