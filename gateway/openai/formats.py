"""What a client wants the answer's text to be held to: OpenAI's `response_format`, and what vLLM's server has beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from gateway.api_request import FormatKind, OutputFormat
from gateway.fields import Body, JsonObject, Neutral, NeutralFalse, OnlyNeutral, Text, json_value
from gateway.grammars import MAX_CHOICES, MAX_SOURCE_CHARACTERS
from springtide.errors import InvalidRequest


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool | str):
        raise ValueError("must be a JSON schema, an object, or its text")
    return json_value(value)


Schema = Annotated[dict[str, Any] | bool | str, BeforeValidator(_schema)]
"""A JSON schema, or its text."""
Source = Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]
Choices = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]], Field(min_length=1, max_length=MAX_CHOICES)
]


class NamedFormat(NamedTuple):
    """A format, and the field that asks for it."""

    field: str
    format: OutputFormat


class NamedSchema(Body):
    name: Annotated[Text, Field(max_length=256)] = ""
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type 'json_schema'")
        return self

    def output_format(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return OutputFormat(FormatKind.JSON_OBJECT)
        return OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(self.json_schema.schema_, ensure_ascii=False))


class StructuredOutputs(Body):
    """vLLM's, of which one is set."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Neutral = None
    disable_fallback: NeutralFalse = None
    disable_any_whitespace: NeutralFalse = None
    disable_additional_properties: NeutralFalse = None
    whitespace_pattern: Neutral = None

    def output_formats(self) -> Iterable[NamedFormat]:
        yield from formats("structured_outputs.", self.json_, self.regex, self.choice, self.grammar, self.json_object)


class GuidedFields(Body):
    """What vLLM's server had before that, beside the other fields of a request."""

    guided_json: Schema | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Annotated[Any, OnlyNeutral("auto", "guidance")] = None
    guided_whitespace_pattern: Neutral = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    def output_format(self) -> NamedFormat | None:
        """Raises InvalidRequest when there are several."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, self.guided_json_object)
        wanted = list(formats("guided_", *guided))
        if self.structured_outputs is not None:
            wanted += self.structured_outputs.output_formats()
        if self.response_format is not None and (response_format := self.response_format.output_format()) is not None:
            wanted.append(NamedFormat("response_format", response_format))
        if len(wanted) > 1:
            fields = ", ".join(one.field for one in wanted)
            raise InvalidRequest(f"{wanted[0].field}: the output can be held to one thing, not to {fields} together", param=wanted[0].field)
        return wanted[0] if wanted else None


def formats(
    prefix: str,
    schema: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
) -> Iterable[NamedFormat]:
    """Those that are set; their fields' names begin with `prefix`."""
    if schema is not None:
        source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        yield NamedFormat(f"{prefix}json", OutputFormat(FormatKind.JSON_SCHEMA, source))
    if regex is not None:
        yield NamedFormat(f"{prefix}regex", OutputFormat(FormatKind.REGEX, regex))
    if choice is not None:
        yield NamedFormat(f"{prefix}choice", OutputFormat(FormatKind.CHOICE, json.dumps(choice, ensure_ascii=False)))
    if grammar is not None:
        yield NamedFormat(f"{prefix}grammar", OutputFormat(FormatKind.GRAMMAR, grammar))
    if json_object:
        yield NamedFormat(f"{prefix}json_object", OutputFormat(FormatKind.JSON_OBJECT))
