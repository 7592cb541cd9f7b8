"""Grammars of answers that may be texts or calls, as the model likes, whose calls fit their tools: for tools that are strict. In Lark as
llguidance has it.

Text is what the family's reader makes no call of. What would begin a call is no text, so that from there on nothing is left but the call's
rules. Calls of tools that are not strict are held to the form alone, with any arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from gateway.api_request import Tool
from gateway.tool_calls.forced import (
    SPACE,
    Literal,
    Schema,
    alternatives,
    arguments_rule,
    keyword_rules,
    mistral_block,
    object_rules,
)

_ANY = "/(?s:.*)/"
_S = r"[ \t\r\n]*"
_ANY_KEYWORDS = r"""
any_keywords: (any_keyword (COMMA any_keyword)*)?
any_keyword: KEYWORD any_value
any_value: STRING | WORD | "[" (any_value (COMMA any_value)*)? "]" | "{" (any_entry (COMMA any_entry)*)? "}"
any_entry: STRING COLON any_value
KEYWORD: /[A-Za-z_][A-Za-z_0-9]* ?= ?/
STRING: /"([^"\\\n]|\\[^\n])*"|'([^'\\\n]|\\[^\n])*'/
WORD: /-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?|[Tt]rue|[Ff]alse|None|null/
COMMA: /,[ \n]{0,4}/
COLON: /:[ \n]{0,4}/
"""


def hermes(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema, opening: str) -> str:
    """`opening`, unless it is empty, begins reasoning, which is no part of the answer."""
    block = f"block: SPACE tool SPACE {literal('</tool_call>')}"
    calls = object_rules(_loosened(tools), "arguments", schema)
    return "\n".join([*_marked("<tool_call>", several, literal, opening), block, *calls, SPACE])


def mistral(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema, opening: str) -> str:
    """As `hermes`."""
    calls = object_rules(_loosened(tools), "arguments", schema)
    return "\n".join([*_marked("[TOOL_CALLS]", several, literal, opening), *mistral_block(tools, several, literal), *calls])


def llama3(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema, opening: str) -> str:
    """As `hermes`. What begins with a bracket is text as long as it does not name a tool."""
    tag, special = _tag("<|python_tag|>", literal)
    names = [_escaped(json.dumps(tool.name, ensure_ascii=False)) for tool in tools]
    passed_over = rf"([ \t\r\n;,\]]|{tag})*"
    before = r"[ \t\r\n;,\]]*" if special else passed_over
    named = rf'"name"{_S}:{_S}({"|".join(names)})'
    lines = [
        f"start: {f'({special})? ' if special else ''}{'call*' if several else 'call?'} TEXT",
        f"call: {alternatives('tool', tools)}",
        # JSON's escapes would be other ways to write a name.
        f"TEXT: {_unopened(opening)} & ~/{passed_over}[{{\\[](?s:.*)({named}|\\\\[u\\/])(?s:.*)/",
        r"END: /[ \t\r\n]{0,4}\}/",
    ]
    for number, (tool, name) in enumerate(zip(_loosened(tools), names, strict=True)):
        kind = rf'("type"{_S}:{_S}"function"{_S},{_S})?'
        head = rf'{before}(\[{_S})?\{{{_S}{kind}"name"{_S}:{_S}{name}{_S},{_S}"(parameters|arguments)"{_S}:{_S}'
        lines += [f"tool_{number}: HEAD_{number} arguments_{number} END", f"HEAD_{number}: /{head}/", arguments_rule(number, tool, schema)]
    return "\n".join(lines)


def pythonic(tools: Sequence[Tool], several: bool, literal: Literal, schema: Schema, opening: str) -> str:
    """As `hermes`. A list that begins with a tool's name and a parenthesis is no text."""
    begin, special_begin = _tag("<|python_start|>", literal)
    _, special_end = _tag("<|python_end|>", literal)
    passed_over = rf"{_S}({begin}{_S})?"
    before = _S if special_begin else passed_over
    names = [_escaped(tool.name) for tool in tools]
    further = ' (", " call)*' if several else ""
    lines = [
        f"start: {f'({special_begin})? ' if special_begin else ''}(TEXT | list)",
        f'list: first{further} "]" {f"({special_end})? " if special_end else ""}REST',
        f"first: {alternatives('first', tools)}",
        f"call: {alternatives('tool', tools)}",
        f"TEXT: {_unopened(opening)} & ~/{passed_over}\\[{_S}({'|'.join(names)}){_S}\\((?s:.*)/",
        f"REST: {_ANY}",
        _ANY_KEYWORDS,
    ]
    for number, (tool, name) in enumerate(zip(tools, names, strict=True)):
        keywords = f"rest_{number}_0_first" if tool.strict else "any_keywords"
        lines.append(f"FIRST_{number}: /{before}\\[{_S}{name}{_S}\\(/")
        lines.append(f'first_{number}: FIRST_{number} {keywords} ")"')
        lines.append(f'tool_{number}: {json.dumps(f"{tool.name}(")} {keywords} ")"')
        if tool.strict:
            lines += keyword_rules(number, tool, schema)
    return "\n".join(lines)


def _marked(mark: str, several: bool, literal: Literal, opening: str) -> Iterator[str]:
    """Rules for texts between which there are blocks, each behind its mark."""
    pattern, special = _tag(mark, literal)
    unmarked = f"~/(?s:.*){pattern}(?s:.*)/"
    yield f"start: FIRST_TEXT | first block {'(further block)* TEXT' if several else 'TEXT'}"
    yield f"FIRST_TEXT: {_unopened(opening)} & {unmarked}"
    yield f"TEXT: {_ANY} & {unmarked}"
    if special:
        yield f"first: FIRST_TEXT {special}"
        yield f"further: TEXT {special}"
    else:
        yield f"FIRST: /(?s:.*){pattern}/ & {_unopened(opening)}"
        yield "first[lazy]: FIRST"
        yield f"further[lazy]: /(?s:.*){pattern}/"


def _unopened(opening: str) -> str:
    """Text that does not begin so."""
    return f"{_ANY} & ~/{_S}{_escaped(opening)}(?s:.*)/" if opening else _ANY


def _tag(text: str, literal: Literal) -> tuple[str, str]:
    """A mark as an expression has it, for what is spelled out, and as a special token, if it is one."""
    written = literal(text)
    return _escaped(text), written if written.startswith("<[") else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _loosened(tools: Sequence[Tool]) -> Sequence[Tool]:
    return [tool if tool.strict else Tool(tool.name) for tool in tools]
