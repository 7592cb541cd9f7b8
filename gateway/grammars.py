"""What an output's text is held to, as a grammar of llguidance: of a JSON schema, a regular expression, choices, or a grammar in another
notation. Whether it can be compiled is for `grammar_checks` to find out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve

from gateway.api_request import FormatKind, OutputFormat
from springtide.errors import InvalidRequest
from springtide.protocol.sampling import Grammar

MAX_SOURCE_CHARACTERS = 1 << 16
MAX_SCHEMA_DEPTH = 64
"""Of a schema's JSON, not of what it describes: a schema may refer to itself."""
MAX_SCHEMA_VALUES = 1 << 14
"""Objects, lists and what is in them."""
MAX_PROPERTIES = 1000
"""Of all objects of a schema together."""
MAX_CHOICES = 1000
_WHITESPACE = "[ \\t\\n\\r]{1,20}"
"""Between the tokens of JSON, where there may be any. A model that is left to go on for ever may."""
_KNOWN_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Others are annotations, as JSON Schema has it."""
_ANY_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_ANY_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_ANY_YEAR}-{_ANY_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_AND_MINUTE}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOUR_AND_MINUTE})"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Of formats that llguidance takes more for than there is: the 29th of any February, the year 0, a 61st second in any minute."""
_LONGEST_HOSTNAME = 253
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "not")


@dataclass(frozen=True, slots=True)
class Beforehand:
    """What an output may have, or has, before the text that is held to something: its reasoning."""

    begin: str
    end: str
    begun: bool
    """The prompt ends within it. Else it may come or not."""
    tokens: tuple[str, ...] = ()
    """Those of the two that are special tokens of the model, and no text."""


def constraint(format: OutputFormat, beforehand: Beforehand | None = None, calls: str = "") -> Grammar:
    """The grammar; `calls` is one, in Lark, of what the output may be instead. Raises InvalidRequest, whose `param` is `format`, for what
    is too large or makes no sense."""
    if len(format.source) > MAX_SOURCE_CHARACTERS:
        raise _invalid(f"may have at most {MAX_SOURCE_CHARACTERS} characters, not {len(format.source)}")
    match format.kind:
        case FormatKind.JSON_OBJECT:
            part = _json_schema({"type": "object"})
        case FormatKind.JSON_SCHEMA:
            part = _json_schema(_schema_of(format.source))
        case FormatKind.REGEX:
            part = _lark(f"start: /{regex_to_lark(format.source, '')}/")
        case FormatKind.CHOICE:
            part = _lark(f"start: {' | '.join(map(_literal, _choices_of(format.source)))}")
        case FormatKind.GRAMMAR:
            part = _lark(_lark_of(format.source))
    return lark_after(part, beforehand, calls)


def schema_in_lark(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A JSON schema as `%json` has it. Raises InvalidRequest."""
    _check_size(schema)
    return _json_schema(_cleaned(dict(schema)))["json_schema"]  # type: ignore[no-any-return]


def lark_constraint(lark: str, beforehand: Beforehand | None = None) -> Grammar:
    """A grammar in llguidance's own notation, as it is."""
    return lark_after(_lark(lark), beforehand)


def lark_after(part: Mapping[str, Any], beforehand: Beforehand | None, calls: str = "") -> Grammar:
    """The grammar whose text, after what may come beforehand, is that of `part`, or of `calls`."""
    parts: list[Mapping[str, Any]] = [part]
    answer = "(@answer | @calls)" if calls else "@answer"
    others = [{"name": "calls", "lark_grammar": calls}] if calls else []
    if beforehand is None and calls:
        parts = [_lark(f"start: {answer}"), {"name": "answer", **part}, *others]
    if beforehand is not None:
        thought = f"{_thought(beforehand)} SPACE {answer}"
        start = thought if beforehand.begun else f"{answer} | {_marker(beforehand.begin, beforehand)} {thought}"
        lark = f"start: {start}\nthought[stop={_literal(beforehand.end)}]: /(?s:.*)/\nTHOUGHT: /(?s:.*)/\nSPACE: /[ \\n]{{0,4}}/\n"
        parts = [{"lark_grammar": lark}, {"name": "answer", **part}, *others]
    source = json.dumps({"grammars": parts}, separators=(",", ":"))
    try:
        return Grammar(source)
    except ValueError as error:
        raise _invalid(f"is too large: {error}") from None


def _thought(beforehand: Beforehand) -> str:
    return f"THOUGHT {beforehand.end}" if beforehand.end in beforehand.tokens else "thought"


def _marker(text: str, beforehand: Beforehand) -> str:
    """A special token is named in the notation as it is, a text is quoted."""
    return text if text in beforehand.tokens else _literal(text)


def _literal(text: str) -> str:
    return json.dumps(text)


def _lark(source: str) -> dict[str, Any]:
    return {"lark_grammar": source}


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    # Alternatives of `oneOf` that cannot be told apart are taken for those of `anyOf`.
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}}}


def _schema_of(source: str) -> dict[str, Any]:
    schema = _json_of(source, "a JSON schema")
    if not isinstance(schema, dict):
        raise _invalid(f"must be a JSON schema, which is an object, not {source[:40]}")
    _check_size(schema)
    cleaned: dict[str, Any] = _cleaned(schema)
    return cleaned


def _check_size(schema: Any) -> None:
    level, depth, values, properties = [schema], 0, 0, 0
    while level:
        depth, values = depth + 1, values + len(level)
        properties += sum(len(one["properties"]) for one in level if isinstance(one, dict) and isinstance(one.get("properties"), dict))
        level = [value for one in level for value in _within(one)]
        if depth > MAX_SCHEMA_DEPTH:
            raise _invalid(f"may be nested at most {MAX_SCHEMA_DEPTH} deep")
        if values > MAX_SCHEMA_VALUES:
            raise _invalid(f"may have at most {MAX_SCHEMA_VALUES} values")
        if properties > MAX_PROPERTIES:
            raise _invalid(f"may name at most {MAX_PROPERTIES} properties")


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _cleaned(schema: Any) -> Any:
    """The schema without what says nothing of the text, but could not be compiled, and with formats as patterns, or bounded, where they
    are known better."""
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            cleaned[name] = {key: _cleaned(one) for key, one in value.items()}
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            cleaned[name] = [_cleaned(one) for one in value]
        elif name in _SCHEMAS:
            cleaned[name] = _cleaned(value)
        elif name == "format" and not isinstance(value, str):
            raise _invalid("has a schema whose `format` is no text")
        elif name == "format" and value in _PATTERNS and "pattern" not in schema:
            cleaned["pattern"] = _PATTERNS[value]
        elif (name == "format" and value not in _KNOWN_FORMATS) or (name == "uniqueItems" and value is False) or name == "x-guidance":
            continue
        else:
            cleaned[name] = value
    if schema.get("format") == "hostname" and isinstance(most := schema.get("maxLength", _LONGEST_HOSTNAME), int):
        # Of its labels alone llguidance knows how long they may be. What is no length is for it to refuse.
        cleaned["maxLength"] = min(most, _LONGEST_HOSTNAME)
    return cleaned


def _choices_of(source: str) -> list[str]:
    choices = _json_of(source, "a list of texts")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise _invalid("must be a list of texts, and not empty")
    if len(choices) > MAX_CHOICES:
        raise _invalid(f"may have at most {MAX_CHOICES} choices, not {len(choices)}")
    return list(dict.fromkeys(choices))


def _lark_of(source: str) -> str:
    """The grammar, if it is not in Lark's notation but in GBNF."""
    if not _GBNF_RULE.search(source):
        return source
    try:
        rules = _inside_out(GrammarParser().parse(source))
        resolve(rules)
        return "\n".join(("%llguidance {}", *map(str, rules.values())))
    except (Exception, RecursionError) as error:  # llguidance raises bare ones
        raise _invalid(f"is no grammar in GBNF: {error}"[:500]) from None


def _inside_out(rules: Mapping[str, RuleNode]) -> dict[str, RuleNode]:
    """The rules in an order in which each comes after those that it is made of, unless these are made of it: `resolve` goes through all of
    them as often as there are rules in a row of which each is made of a later one."""
    ordered: dict[str, RuleNode] = {}
    entered: set[str] = set()
    left = [(name, False) for name in rules]
    while left:
        name, done = left.pop()
        if done:
            ordered[name] = rules[name]
        elif name in rules and name not in entered:
            entered.add(name)
            left.append((name, True))
            left += ((one.name, False) for one in _nodes(rules[name]) if isinstance(one, RuleRefNode))
    return ordered


def _nodes(node: ASTNode) -> Iterable[ASTNode]:
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += node.children()


def _json_of(source: str, what: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"must be {what} as JSON: {error}"[:500]) from None


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"format {message}", param="format")
