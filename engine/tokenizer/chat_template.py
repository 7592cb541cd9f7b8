"""Chat templates: Jinja in a sandbox, with the names that templates on the Hugging Face hub count on. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from springtide.errors import ConfigError, InvalidRequest

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


_HERE = "\ue000the answer goes on here\ue001"
"""Stands at the end of a message that is to be continued while the template writes it: what comes before it is the prompt."""


class ChatTemplate:
    """`special_tokens` are the texts of `bos_token`, `eos_token` and so on. Raises ConfigError when `source` is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
            """Whether it writes the tools that there are."""
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
        continue_final_message: bool = False,
    ) -> str:
        """`options` are further names for the template. `continue_final_message`: the text ends with the last message's content. Raises
        InvalidRequest, with the template's own words, when it does not take these messages."""
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{_HERE}"}]
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(**{**self._special_tokens, **options, **given})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", param="messages") from None
        if not continue_final_message:
            return text
        if (at := text.rfind(_HERE)) < 0:
            raise InvalidRequest(
                "the model's chat template changes the last message, which therefore cannot be continued", param="messages"
            )
        return text[:at]


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
