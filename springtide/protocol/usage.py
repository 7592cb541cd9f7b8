"""What an answer took. Clients have it too, so nothing is imported here that a client does without."""

from __future__ import annotations

from springtide.values import value_class


@value_class(frozen=True, slots=True)
class KeptTokens:
    """Tokens of a prompt that are kept for so long."""

    ttl_s: float
    tokens: int


@value_class(frozen=True, slots=True)
class Usage:
    """What an answer took, in tokens, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, those that were found in the pool."""
    reasoning_tokens: int = 0
    """Of the completion, those of what the model said to itself first."""
    kept_tokens: tuple[KeptTokens, ...] = ()
    """Of the prompt, those that were not found, and are kept from now on because the request has marked them."""
    cache_miss: str = ""
    """Why the context cache that the request begins with was not found; empty: it was, or there is none."""

    @property
    def num_kept(self) -> int:
        """The number of `kept_tokens`."""
        return sum(kept.tokens for kept in self.kept_tokens)
