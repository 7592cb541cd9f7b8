"""Text to token ids and back, and chat templates. No torch, no transformers.

The gateway uses `load_tokenizer(info)`, `Tokenizer.encode`, `apply_chat_template`, `token_bytes` and one `detokenizer()` an output.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import tokenizers

from engine.formats.gguf_file import read_gguf
from engine.formats.hf_files import read_chat_template, read_json
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.detokenizer import StreamingDetokenizer
from engine.tokenizer.gguf_tokenizer import gguf_special_tokens, gguf_tokenizer
from springtide.errors import ConfigError, InvalidRequest, UnsupportedModel
from springtide.modelinfo import ModelInfo

__all__ = ["StreamingDetokenizer", "Tokenizer", "load_tokenizer"]

_SPACE_MARK = "▁"


class Tokenizer:
    """Thread-safe. Raises UnsupportedModel when `backend` decodes in a way that is neither byte-level nor SentencePiece's."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._byte_level = _decodes_byte_level(backend)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._dropped = _dropped_bytes(backend) if self._byte_level else b""
        self.most_bytes_a_token = _most_bytes_a_token(backend, self._byte_level, self._dropped)
        """No token stands for more bytes (UTF-8) of a text than this, not counting those that the vocabulary does not know and leaves out;
        None where a token may stand for any number of bytes."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's may be larger, as matrices are padded."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens that are written out in `text` are recognised; `add_special_tokens` puts the model's own around it (BOS)."""
        # The call for a single text keeps every other thread waiting until all of it is done.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """How many tokens `text` makes at least, found in a thousandth of the time that it takes to encode it."""
        if self.most_bytes_a_token is None:
            return 0
        return -(-len(text.encode().translate(None, self._dropped)) // self.most_bytes_a_token)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens that are all of it. For a model's output, which goes on where the prompt ended, use a StreamingDetokenizer."""
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the conversation, ready for the assistant's turn.

        Raises InvalidRequest when the model has no chat template or its template does not take these messages.
        """
        return self.encode(self.chat_template.render(messages, add_generation_prompt), add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises InvalidRequest when the model has none."""
        if self._chat_template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions with a prompt", param="messages")
        return self._chat_template

    def detokenizer(self, *, skip_special_tokens: bool = True, kept: Collection[int] = ()) -> StreamingDetokenizer:
        """A detokenizer for one output. `kept` are special tokens that have a text all the same."""
        return StreamingDetokenizer(self, skip_special_tokens=skip_special_tokens, kept=kept)

    def special_id(self, text: str) -> int | None:
        """The special token of this text; None: there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._special else None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text in UTF-8, possibly part of a character; empty for ids beyond the vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = _bytes_of_alphabet()
            known = [alphabet.get(character) for character in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, incomplete characters replaced; special tokens by name. For logprobs."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def load_tokenizer(info: ModelInfo) -> Tokenizer:
    """Raises ConfigError or UnsupportedModel, naming the file and what is wrong in it."""
    path = Path(info.path)
    if path.is_dir():
        return _from_directory(path)
    file = read_gguf(path)
    source = file.text("tokenizer.chat_template", "")
    return Tokenizer(gguf_tokenizer(file), ChatTemplate(source, gguf_special_tokens(file)) if source else None)


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise bare Exceptions
        raise ConfigError(f"cannot read {path}: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    source = read_chat_template(directory)
    return Tokenizer(backend, ChatTemplate(source, _special_tokens(directory)) if source else None)


def _special_tokens(directory: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on, by those names."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return {}
    named = {name: value for name, value in read_json(path).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, Mapping) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _decodes_byte_level(backend: tokenizers.Tokenizer) -> bool:
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    kinds = [decoder["type"] for decoder in state.get("decoders", [state])]
    if kinds == ["ByteLevel"]:
        return True
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise UnsupportedModel(f"tokenizer.json: decoder {', '.join(kinds)} is not supported; ByteLevel and SentencePiece's are")


_KEEPING = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation")
"""Pre-tokenizers that leave nothing out, unless `Split` and `Punctuation` are told to."""


def _dropped_bytes(backend: tokenizers.Tokenizer) -> bytes:
    """What a byte-level vocabulary has no letter for, such as control characters."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return bytes(byte for letter, byte in _bytes_of_alphabet().items() if letter not in vocabulary)


def _most_bytes_a_token(backend: tokenizers.Tokenizer, byte_level: bool, dropped: bytes) -> int | None:
    """Known of a tokenizer that takes every byte of a text, but for the `dropped`, into some token of its vocabulary."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=True)
    if not isinstance(model, tokenizers.models.BPE) or (dropped and (backend.normalizer is not None or model.unk_token is not None)):
        return None
    if not byte_level and not (model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))):
        # One unknown token may be any number of characters.
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if any(part["type"] not in _KEEPING or part.get("behavior") == "Removed" for part in _parts(backend.pre_tokenizer, "pretokenizers")):
        return None
    shrinking = [_most_shrinking(part) for part in _parts(backend.normalizer, "normalizers")]
    if None in shrinking:
        return None
    letters = _bytes_of_alphabet() if byte_level else {}
    longest = max(len(token) if all(map(letters.__contains__, token)) else len(token.encode()) for token in vocabulary)
    return longest * prod(factor for factor in shrinking if factor is not None)


def _most_shrinking(normalizer: dict[str, Any]) -> int | None:
    """How many times shorter a text can get by it; None where it may drop any number of characters."""
    match normalizer:
        case {"type": "NFC"}:
            return 3  # the Kelvin sign is a plain K
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if len(content.encode()) >= len(pattern.encode()):
            return 1
    return None


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Of a normalizer or pre-tokenizer, which may be a sequence of them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state.get(name, [state]))


@lru_cache(maxsize=1)
def _bytes_of_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
