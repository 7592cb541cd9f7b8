"""What one request may be at most, from what the model's context could ever hold of it."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.schema import MAX_BIASED_TOKENS
from springtide.rpc.channels import MAX_MESSAGE_BYTES

_BYTES_A_TOKEN = 256
"""Taken for the longest token where the tokenizer promises nothing."""
_ESCAPED_BYTES = 6
"""Of one byte of text, as JSON may write it: `\\u0000`."""
_BYTES_A_MESSAGE = 64
"""Of what is around a chat message's text in JSON, or of a token id with whatever space is left between them."""
_BYTES_A_BIAS = 32
_FIXED_BYTES = 64 << 10
_FIXED_VALUES = 1 << 15


@dataclass(frozen=True, slots=True)
class Bounds:
    max_body_bytes: int
    """Of JSON: what fills the context fits however it is written, with as many biases as there may be."""
    max_message_bytes: int
    """The same of a message over gRPC."""
    max_values: int
    """Lists, objects, and what is in them, of one body. Python holds up everybody for 0.2 to 1 us with each while it reads them."""

    @classmethod
    def of(cls, context_length: int, vocab_size: int, most_bytes_a_token: int | None) -> Bounds:
        biases = min(vocab_size, MAX_BIASED_TOKENS)
        text = context_length * (most_bytes_a_token or _BYTES_A_TOKEN)
        body = _ESCAPED_BYTES * text + _BYTES_A_MESSAGE * context_length + _BYTES_A_BIAS * biases + _FIXED_BYTES
        message = text + _BYTES_A_MESSAGE // 4 * context_length + _BYTES_A_BIAS // 2 * biases + _FIXED_BYTES
        return cls(min(body, MAX_MESSAGE_BYTES), min(message, MAX_MESSAGE_BYTES), _FIXED_VALUES + 4 * context_length + 2 * biases)
