"""What an answer took. Clients have it too, so nothing is imported here that a client does without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took, in tokens, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, those that were found in the pool."""
    reasoning_tokens: int = 0
    """Of the completion, those of what the model said to itself first."""
