"""A gateway's order to run an attempt, checked: what a prefill and a decode node both have to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from springtide.blocks import KEY_BYTES, block_keys, blocks_for
from springtide.errors import InvalidRequest
from springtide.ids import BlockKey
from springtide.modelinfo import ModelInfo
from springtide.rpc import node_pb2
from springtide.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt's input. Output position 0 is the first token after the original prompt."""

    attempt_id: str
    request_id: str
    tenant: str
    token_ids: Sequence[int]
    """The original prompt, then the tokens that an earlier attempt has already sent."""
    num_prompt_tokens: int
    params: SamplingParams
    namespace: BlockKey
    keys: tuple[BlockKey, ...]
    """Of every full block of `token_ids`."""
    num_blocks: int
    """That hold `token_ids`, the last possibly partial."""
    age_s: float = 0.0
    """How long ago it arrived at its gateway, whatever attempts it has had since: where there is not room for all, the oldest goes
    first."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def first_position(self) -> int:
        """Output position of the next token."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def continues(self) -> bool:
        """An earlier attempt has already sent tokens of this request."""
        return self.first_position > 0


def parse_request(start: node_pb2.PrefillStart | node_pb2.DecodeStart, info: ModelInfo, block_tokens: int) -> Request:
    """Raises InvalidRequest, naming the field and the value."""
    token_ids = tuple(start.token_ids)
    if not token_ids:
        raise InvalidRequest("token_ids must not be empty", param="token_ids")
    if not 1 <= start.num_prompt_tokens <= len(token_ids):
        raise InvalidRequest(
            f"num_prompt_tokens must be between 1 and the {len(token_ids)} token_ids, not {start.num_prompt_tokens}",
            param="num_prompt_tokens",
        )
    if max(token_ids) >= info.vocab_size:
        raise InvalidRequest(f"token_ids must be below the vocabulary size {info.vocab_size}, not {max(token_ids)}", param="token_ids")
    if len(start.namespace) != KEY_BYTES:
        raise InvalidRequest(f"namespace must be {KEY_BYTES} bytes, not {len(start.namespace)}", param="namespace")
    try:
        params = SamplingParams.from_proto(start.sampling)
    except ValueError as error:
        raise InvalidRequest(f"sampling.{error}", param="sampling") from None
    total = start.num_prompt_tokens + params.max_tokens
    if total > info.context_length:
        raise InvalidRequest(
            f"prompt ({start.num_prompt_tokens} tokens) and sampling.max_tokens ({params.max_tokens}) make {total}, "
            f"more than the model's context of {info.context_length}",
            param="sampling.max_tokens",
        )
    namespace = BlockKey(start.namespace)
    return Request(
        attempt_id=start.context.attempt_id,
        request_id=start.context.request_id,
        tenant=start.context.tenant,
        token_ids=token_ids,
        num_prompt_tokens=start.num_prompt_tokens,
        params=params,
        namespace=namespace,
        keys=tuple(block_keys(namespace, token_ids, block_tokens)),
        num_blocks=blocks_for(len(token_ids), block_tokens),
        age_s=max(0.0, start.context.age_ms / 1000),
    )
