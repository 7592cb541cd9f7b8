"""docs/configuration.md, from the configuration model itself."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from springtide.config import ENV_PREFIX, ClusterConfig

_INTRODUCTION = f"""# Configuration

One model for every process, `ClusterConfig` in `springtide/config.py`. This page is made from it by `springtide config --describe`.

Later sources win: the defaults below, then a YAML file (`springtide up --config FILE`), then the environment, then the command line.
A setting has one name, here with dots. It is written

- in YAML as nested mappings: `kv: {{block_tokens: 64}}`,
- in the environment with the prefix `{ENV_PREFIX}` and two underscores for a dot: `{ENV_PREFIX}KV__BLOCK_TOKENS=64`,
- on the command line by an option of its own (`springtide up --help`) or as `--set kv.block_tokens=64`.

Sizes are bytes, or a number with a unit of 1024: `512MiB`, `1GiB`. A wrong name or value stops the command with exit
code 2 and a message that names the setting, the value and where it came from. `springtide config` prints the configuration that results.
"""


def configuration_reference() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    for name, rows in _sections(ClusterConfig, ""):
        heading = f"## {name}" if name else "## Cluster"
        parts.append("\n".join([heading, "", "| setting | values | default | meaning |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _sections(model: type[BaseModel], name: str) -> Iterator[tuple[str, list[str]]]:
    """Each section by its dotted name, with its rows; a section before those in it."""
    prefix = f"{name}." if name else ""
    yield name, list(_rows(model, prefix))
    for field, info in model.model_fields.items():
        if _is_section(info):
            yield from _sections(info.annotation, f"{prefix}{field}")  # type: ignore[arg-type]


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        if not _is_section(info):
            yield f"| `{prefix}{name}` | {_values(info)} | {_default(info)} | {info.description or ''} |"


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _values(info: FieldInfo) -> str:
    size = any(type(bound).__name__ == "BeforeValidator" for bound in info.metadata)
    return ", ".join(["size" if size else _type_name(info.annotation), *_bounds(info.metadata)])


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for bound in metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if getattr(bound, attribute, None) is not None:
                yield f"{sign} {getattr(bound, attribute)}"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_plural(arguments[1])}"
    if origin in (types.UnionType, Union):
        return " or ".join(_type_name(argument) for argument in arguments if argument is not types.NoneType)
    if origin is Annotated:
        return ", ".join([_type_name(arguments[0]), *_bounds(arguments[1].metadata)])
    names = {"str": "text", "int": "integer", "float": "number", "bool": "`true`, `false`", "Path": "path", "SecretStr": "text"}
    return names[annotation.__name__]


def _plural(annotation: Any) -> str:
    if annotation is str:
        return "text"
    return "sizes" if get_args(annotation)[0] is int else "numbers"


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"`{{{', '.join(value)}}}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
