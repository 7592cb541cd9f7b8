"""The JSON and template files of a Hugging Face directory. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from springtide.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError when it cannot be read or is no JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(document).__name__}")
    return document


def read_chat_template(directory: Path) -> str | None:
    """The template in chat_template.jinja, or else from tokenizer_config.json (where several are named: the one called `default`)."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{config}: chat_template must be a string, not a {type(template).__name__}")
    return template


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, as the index names them where there is one. Raises ConfigError when one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files_of = read_json(index).get("weight_map")
        if not isinstance(files_of, dict) or not all(isinstance(name, str) for name in files_of.values()):
            raise ConfigError(f"{index}: weight_map must be an object that names the file of each tensor")
        files = [directory / name for name in sorted(set(files_of.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} has no .safetensors file; other weight formats are not supported")
    for file in files:
        if not file.exists():
            raise ConfigError(f"{index} names {file.name}, which is missing")
    return files
