"""Grammars of calls, for outputs that have to be calls: in Lark as llguidance has it, in the words of each family of models."""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.api_request import Tool
from springtide.errors import InvalidRequest

Literal = Callable[[str], str]
"""How a grammar writes a text: a special token of the model is not the text that it shows."""
Schema = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A schema as grammars have it. Raises InvalidRequest."""
SPACE = "SPACE: /[ \\n]{0,4}/"
"""Where a grammar leaves some."""
_MOST_TOOLS = 128
MAX_CALLS = 64
"""Of one output: a model that has begun to repeat a call would else go on for as long as it may."""


def hermes(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema) -> str:
    call = f'{literal("<tool_call>")} "\\n" tool "\\n" {literal("</tool_call>")}'
    return _grammar(_repeated("call", '"\\n"', several), call, tools, "arguments", schema)


def llama3(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema) -> str:
    return _grammar(_repeated("call", '"; "', several), "tool", tools, "parameters", schema)


def mistral(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema) -> str:
    mark = literal("[TOOL_CALLS]")
    # One list of them, or one behind each mark: not lists behind marks, of which each could have as many again.
    start = f"call{{1,{MAX_CALLS}}} | {mark} list" if several else "call"
    lines = [_grammar(start, f"{mark} block", tools, "arguments", schema), *mistral_block(tools, False, literal)]
    return "\n".join([*lines, f"list: {_list_of(_more_calls(1))}"] if several else lines)


def mistral_block(tools: Sequence[Tool], several: bool, literal: Literal) -> Iterator[str]:
    """Rules for what is behind the mark of calls: a list of objects or, as later models write it, a name and its arguments."""
    yield f"block: {_list_of(_more_calls(0) if several else '')} | SPACE named"
    yield f"named: {' | '.join(f'named_{number}' for number in range(len(tools)))}"
    marks = f"({literal('[CALL_ID]')} CALL_ID)? ({literal('[ARGS]')})?"
    for number, tool in enumerate(tools):
        yield f"named_{number}: {json.dumps(tool.name)} {marks} SPACE arguments_{number}"
    yield "CALL_ID: /[a-zA-Z0-9]{9}/"
    yield SPACE


def pythonic(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema) -> str:
    calls = _repeated("call", '", "', several)
    lines = [f'start: "[" {calls} "]"', f"call: {alternatives('tool', tools)}"]
    for number, tool in enumerate(tools):
        lines.append(f'tool_{number}: {json.dumps(f"{tool.name}(")} rest_{number}_0_first ")"')
        lines += keyword_rules(number, tool, schema)
    return "\n".join(lines)


def _list_of(more: str) -> str:
    return f'SPACE "[" SPACE tool {more} SPACE "]"'


def _more_calls(least: int) -> str:
    return f'(SPACE "," SPACE tool){{{least},{MAX_CALLS - 1}}}'


def _repeated(call: str, between: str, several: bool) -> str:
    return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if several else call


def _grammar(start: str, call: str, tools: Sequence[Tool], arguments: str, schema: Schema) -> str:
    return "\n".join([f"start: {start}", f"call: {call}", *object_rules(tools, arguments, schema)])


def object_rules(tools: Sequence[Tool], arguments: str, schema: Schema) -> Iterator[str]:
    """Rules for `tool`, a call as an object in JSON with its arguments in the field `arguments`."""
    yield f"tool: {alternatives('tool', tools)}"
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{arguments}": ')
        yield f'tool_{number}: {head} arguments_{number} "}}"'
        yield arguments_rule(number, tool, schema)


def arguments_rule(number: int, tool: Tool, schema: Schema) -> str:
    return f"arguments_{number}: %json {json.dumps(schema(_closed(tool.parameters)))}"


def alternatives(rule: str, tools: Sequence[Tool]) -> str:
    """One of the numbered rules of the tools. Raises InvalidRequest."""
    if len(tools) > _MOST_TOOLS:
        raise InvalidRequest(f"tools: calls can be held to at most {_MOST_TOOLS}, not {len(tools)}", param="tools")
    return " | ".join(f"{rule}_{number}" for number in range(len(tools)))


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a tool does not name would be none of its own."""
    closed = {"type": "object", **parameters}
    return {"additionalProperties": False, **closed} if "properties" in closed else closed


def keyword_rules(tool_number: int, tool: Tool, schema: Schema) -> Iterator[str]:
    """Rules for what is between the parentheses of a call: each property once, in their order, those that are not required or not."""
    properties, required = tool.parameters.get("properties") or {}, tool.parameters.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InvalidRequest(f"tools: the parameters of {tool.name} are no JSON schema of an object", param="tools")
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    for place, (name, described) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequest(f"tools: {name[:100]!r} of {tool.name} is no name that this model could write", param="tools")
        rule, value = f"rest_{tool_number}_{place}", f"value_{tool_number}_{place}"
        following = f"rest_{tool_number}_{place + 1}"
        argument = f"{json.dumps(f'{name}=')} {value}"
        yield f"{value}: %json {json.dumps(schema({**shared, **described} if isinstance(described, dict) else {}))}"
        if name in required:
            yield f"{rule}_first: {argument} {following}"
            yield f'{rule}: ", " {argument} {following}'
        else:
            yield f"{rule}_first: {argument} {following} | {following}_first"
            yield f'{rule}: (", " {argument})? {following}'
    end = f"rest_{tool_number}_{len(properties)}"
    yield f'{end}_first: ""'
    yield f'{end}: ""'
