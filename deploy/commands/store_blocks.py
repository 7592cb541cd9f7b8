"""Which blocks a command of `springtide store` means: keys as `ls` shows them, or a prompt, tokenised as the gateway does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.commands.locate import Located
from deploy.local.plan import ClusterPaths
from engine.tokenizer.tokenizer import load_tokenizer
from gateway.api_request import ApiRequest, Conversation, Message, Speaker, Texts
from gateway.prepare import Preparer
from springtide.blocks import KEY_BYTES, block_keys, namespace_root
from springtide.errors import ConfigError, Unavailable
from springtide.ids import BlockKey
from springtide.modelinfo import ModelInfo


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt as the user names it: by one of the three."""

    text: str | None = None
    """As of a plain completion."""
    chat: str | None = None
    """A user's first message."""
    token_ids: Sequence[int] | None = None
    tenant: str = ""

    @property
    def given(self) -> bool:
        return any(part is not None for part in (self.text, self.chat, self.token_ids))


def parse_tokens(text: str) -> tuple[int, ...]:
    """The token ids of `1,2,3`. Raises ConfigError."""
    try:
        token_ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {text}: write token ids with commas between them, such as 1,2,3") from None
    if not all(0 <= token_id < 1 << 32 for token_id in token_ids):
        raise ConfigError(f"--tokens {text}: token ids are between 0 and {(1 << 32) - 1}")
    return token_ids


def parse_key_prefix(text: str) -> str:
    """Raises ConfigError."""
    prefix = text.lower()
    if not prefix or len(prefix) > 2 * KEY_BYTES or not set(prefix) <= set("0123456789abcdef"):
        raise ConfigError(f"{text!r} is no block key: up to {2 * KEY_BYTES} hexadecimal digits, such as `springtide store ls` shows")
    return prefix


async def prompt_keys(located: Located, prompt: NamedPrompt) -> list[BlockKey]:
    """The keys of every full block. Raises ConfigError when there is none, Unavailable when nobody says which model it is."""
    details = next((member.details for member in located.members if member.role in ("prefill", "decode")), None)
    if details is None:
        raise Unavailable("no engine of the cluster is up to say which model it serves; name blocks by their keys")
    block_tokens = int(details["block_tokens"])
    token_ids = _token_ids(located, prompt)
    root = namespace_root(details["fingerprint"], details["dtype"], block_tokens, prompt.tenant)
    keys = block_keys(root, token_ids, block_tokens)
    if not keys:
        raise ConfigError(f"the prompt has {len(token_ids)} tokens and no full block of {block_tokens}: nothing of it is ever in the pool")
    return keys


def _token_ids(located: Located, prompt: NamedPrompt) -> Sequence[int]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    if located.record is None:
        raise ConfigError("a prompt's text needs the model's tokenizer, which only a cluster of this machine lends; give its --tokens")
    info = ModelInfo.load(ClusterPaths(Path(located.record.run_dir)).model_info)
    preparer = Preparer(info.name, info.context_length, info.vocab_size, load_tokenizer(info))
    asked = Conversation((Message(Speaker.USER, prompt.chat or ""),)) if prompt.text is None else Texts((prompt.text,))
    return preparer.tokens(ApiRequest(info.name, asked))[0]
