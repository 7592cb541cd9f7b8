"""A gateway's order to run an attempt, checked against the model: what a prefill and a decode node both have to know of it."""

from __future__ import annotations

from springtide.errors import InvalidRequest
from springtide.modelinfo import ModelInfo
from springtide.protocol.starts import Request


def check_request(request: Request, info: ModelInfo, block_tokens: int) -> None:
    """Raises InvalidRequest, naming the field and the value."""
    if request.block_tokens != block_tokens:
        raise InvalidRequest(f"block_tokens must be {block_tokens}, as here, not {request.block_tokens}", param="block_tokens")
    if max(request.token_ids) >= info.vocab_size:
        message = f"token_ids must be below the vocabulary size {info.vocab_size}, not {max(request.token_ids)}"
        raise InvalidRequest(message, param="token_ids")
    total = request.num_prompt_tokens + request.params.max_tokens
    if total > info.context_length:
        raise InvalidRequest(
            f"prompt ({request.num_prompt_tokens} tokens) and params.max_tokens ({request.params.max_tokens}) make {total}, "
            f"more than the model's context of {info.context_length}",
            param="params.max_tokens",
        )
