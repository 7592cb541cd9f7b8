"""JSON schemas of growing nastiness, always the same ones: twenty levels of ten kinds. `python -m tests.support.json_schemas URL` asks the
server there for an output of each, at temperature 1, and says which were finished, and which do not satisfy their schema."""

from __future__ import annotations

import concurrent.futures
import json
import random
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import httpx
import jsonschema

Schema = dict[str, Any]
LEVELS = 20
_KEYS = [
    "name",
    "größe",
    "名前",
    "🙂",
    'a "b"',
    "c\\d",
    "e/f",
    "x.y",
    "",
    " ",
    "tab\there",
    "type",
    "properties",
    "$ref",
    "émile",
    "UPPER",
    "null",
]
_TEXTS = ["ja", "non", "たぶん", '"', "\\", "line\nbreak", "", "a b", "</s>", "{}", "🙂🙃", "0", "null", "\u00a0"]
_PATTERNS = [
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3,5}$",
    "[0-9]",
    "^(foo|bar|ba[zq])+$",
    "^\\d{4}-\\d{2}$",
    "^[^aeiou]{1,6}$",
    "^a.{2,5}b$",
    "^(?:[a-f0-9]{2}:){2,5}[a-f0-9]{2}$",
    "^[äöü]+ß?$",
    "^x?y*z$",
    "^/[a-z]+(/[a-z]+)*/?$",
    "^\\+[1-9]\\d{3,9}$",
]
_FORMATS = ["date", "email", "uuid", "ipv4", "date-time", "time", "ipv6", "hostname", "uri", "duration"]
_FORMAT_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
assert not set(_FORMATS) - _FORMAT_CHECKER.checkers.keys(), "jsonschema passes over a format that it has no library for"


def schemas() -> list[tuple[str, Schema]]:
    """All of them, the harder the later, each with its name."""
    return [(f"{kind.__name__.strip('_')}-{level}", kind(level, random.Random(level))) for level in range(1, LEVELS + 1) for kind in _KINDS]


def check(text: str, schema: Schema) -> None:
    """Raises ValueError or jsonschema.ValidationError when the text is no JSON that satisfies the schema. Numbers are taken as they are
    written: the nearest floating point number of one below a bound may be the bound."""
    jsonschema.Draft202012Validator(schema, format_checker=_FORMAT_CHECKER).validate(json.loads(text, parse_float=Decimal))


def _object(properties: Schema, dice: random.Random, *, closed: bool = True) -> Schema:
    required = [name for name in properties if dice.random() < 0.7] or list(properties)[:1]
    return {"type": "object", "properties": properties, "required": required, **({"additionalProperties": False} if closed else {})}


def _nested(level: int, dice: random.Random) -> Schema:
    schema: Schema = {"type": "boolean"}
    for depth in range(level):
        schema = _object({f"level{depth}": schema, f"flag{depth}": {"type": "null"}}, dice)
    return _object({"root": schema}, dice)


def _choices(level: int, dice: random.Random) -> Schema:
    values = [*_TEXTS, 0, -1, 3.5, 1e9, True, False, None, 10**15]
    chosen = dice.sample(values, min(len(values), 1 + level))
    return _object({"one": {"enum": chosen}, "same": {"const": chosen[0]}, "text": {"type": "string", "enum": _TEXTS[: level + 1]}}, dice)


def _patterns(level: int, dice: random.Random) -> Schema:
    count = 1 + level // 4
    return _object({f"p{i}": {"type": "string", "pattern": pattern} for i, pattern in enumerate(dice.sample(_PATTERNS, count))}, dice)


def _formats(level: int, dice: random.Random) -> Schema:
    names = [_FORMATS[(level + i) % len(_FORMATS)] for i in range(1 + level // 6)]
    return _object({f"f{i}": {"type": "string", "format": name} for i, name in enumerate(names)}, dice)


def _numbers(level: int, dice: random.Random) -> Schema:
    low = dice.randint(-(10 ** (level // 3)), 10 ** (level // 3))
    high = low + dice.randint(1, 10 ** (1 + level // 3))
    return _object(
        {
            "between": {"type": "integer", "minimum": low, "maximum": high},
            "within": {"type": "integer", "exclusiveMinimum": low - 2, "exclusiveMaximum": high + 2},
            "number": {"type": "number", "minimum": low / 4, "maximum": high / 4},
            "times": {"type": "integer", "multipleOf": 1 + level % 7},
            "above": {"type": "number", "exclusiveMinimum": 0},
        },
        dice,
    )


def _arrays(level: int, dice: random.Random) -> Schema:
    item: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
    for _ in range(1 + level // 5):
        least = dice.randint(0, 2)
        item = {"type": "array", "items": item, "minItems": least, "maxItems": least + 2}
    tuple_of = [{"type": "boolean"}, {"type": "string", "maxLength": 4}, {"type": "null"}][: 1 + level % 3]
    fixed = {"type": "array", "prefixItems": tuple_of, "items": False, "minItems": len(tuple_of)}
    return _object({"grid": item, "fixed": fixed, "short": {"type": "string", "minLength": 2, "maxLength": 2 + level}}, dice)


def _alternatives(level: int, dice: random.Random) -> Schema:
    shapes = [
        {
            "type": "object",
            "properties": {"kind": {"const": f"kind{i}"}, f"v{i}": _scalar(dice)},
            "required": ["kind", f"v{i}"],
            "additionalProperties": False,
        }
        for i in range(2 + level // 3)
    ]
    return {
        "type": "object",
        "properties": {
            "any": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
            "shape": {"oneOf": shapes},
            "maybe": {"type": ["boolean", "null"]},
        },
        "required": ["any", "shape"],
        "additionalProperties": False,
    }


def _recursive(level: int, dice: random.Random) -> Schema:
    leaf = {"type": "integer", "minimum": 0, "maximum": 9}
    definitions: Schema = {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"$ref": "#/$defs/leaf"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
        "leaf": leaf,
        **{f"link{i}": {"$ref": f"#/$defs/link{i + 1}"} for i in range(level)},
        f"link{level}": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
    }
    return {
        "$defs": definitions,
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "link": {"$ref": "#/$defs/link0"}},
        "required": ["tree", "link"],
        "additionalProperties": False,
    }


def _keys(level: int, dice: random.Random) -> Schema:
    names = dice.sample(_KEYS, min(len(_KEYS), 1 + level))
    schema = _object({name: _scalar(dice) for name in names}, dice, closed=level % 2 == 0)
    if level % 2:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 99}
        if level % 4 == 1:
            schema |= {"maxProperties": len(names) + 1, "required": names}
    if level % 5 == 0:
        schema = {"type": "object", "patternProperties": {"^n_[a-z]{1,4}$": {"type": "boolean"}}, "additionalProperties": False}
    return schema


def _mixed(level: int, dice: random.Random) -> Schema:
    others = [kind for kind in _KINDS if kind not in (_mixed, _recursive)]
    return _object({f"part{i}": dice.choice(others)(dice.randint(1, level), dice) for i in range(1 + level // 5)}, dice)


def _scalar(dice: random.Random) -> Schema:
    return dice.choice(
        [
            {"type": "boolean"},
            {"type": "integer", "minimum": -5, "maximum": 500},
            {"type": "string", "maxLength": 6},
            {"enum": ["a", "b", 1, None]},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        ]
    )


_KINDS: list[Callable[[int, random.Random], Schema]] = [
    _choices,
    _nested,
    _patterns,
    _formats,
    _numbers,
    _arrays,
    _alternatives,
    _recursive,
    _keys,
    _mixed,
]


def main(url: str) -> int:
    """How many outputs that were finished do not satisfy their schemas."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]

    def outcome(numbered: tuple[int, tuple[str, Schema]]) -> str:
        seed, (name, schema) = numbered
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Answer in JSON."}],
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 500,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        }
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        if reply.status_code != 200:
            return f"{name}: refused: {reply.text}"
        choice = reply.json()["choices"][0]
        if choice["finish_reason"] != "stop":
            return "unfinished"
        try:
            check(choice["message"]["content"], schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{name}: {choice['message']['content']!r} does not satisfy its schema: {error}"
        return "valid"

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(outcome, enumerate(schemas())))
    wrong = [one for one in outcomes if one not in ("valid", "unfinished")]
    print(*wrong, sep="\n")
    print(f"{outcomes.count('valid')} valid, {outcomes.count('unfinished')} not finished within 500 tokens, {len(wrong)} wrong or refused")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
