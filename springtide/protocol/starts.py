"""Words of what gateways order from nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from springtide.blocks import KEY_BYTES, PackedKeys, blocks_for, packed
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, NodeId, RequestId
from springtide.protocol.codec import As
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import PrefixSource
from springtide.values import value_class


def _unpacked(keys: bytes) -> tuple[BlockKey, ...]:
    return tuple(PackedKeys(keys))


@value_class(frozen=True, slots=True)
class Request:
    """The input of an attempt. Output position 0 is the first token after the original prompt. Raises InvalidRequest, naming the field."""

    attempt_id: AttemptId
    request_id: RequestId
    tenant: str
    token_ids: Sequence[int]
    """The original prompt, then the tokens that an earlier attempt has already sent."""
    num_prompt_tokens: int
    params: SamplingParams
    namespace: BlockKey
    """Root of the block keys (springtide.blocks.namespace_root)."""
    keys: Annotated[tuple[BlockKey, ...], As(packed, _unpacked)]
    """Of every full block of `token_ids`."""
    block_tokens: int
    age_s: float = 0.0
    """How long ago it arrived at its gateway, whatever attempts it has had since: where there is not room for all, who has waited longest
    for so much goes first, and the youngest gives way."""
    traceparent: str = ""
    """W3C Trace Context header of the request's span or, where it has none, of the client's; empty when there is neither."""
    idle: bool = False
    """As of Terms: it gives way to all that are not, and never waits for room at a node."""
    traced: bool = False
    """What its time goes into is to be told (springtide/protocol/timings.py)."""

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if not count:
            raise InvalidRequest("token_ids must not be empty", param="token_ids")
        if not 1 <= self.num_prompt_tokens <= count:
            message = f"num_prompt_tokens must be between 1 and the {count} token_ids, not {self.num_prompt_tokens}"
            raise InvalidRequest(message, param="num_prompt_tokens")
        if self.block_tokens < 1:
            raise InvalidRequest(f"block_tokens must be at least 1, not {self.block_tokens}", param="block_tokens")
        if len(self.namespace) != KEY_BYTES:
            raise InvalidRequest(f"namespace must be {KEY_BYTES} bytes, not {len(self.namespace)}", param="namespace")
        if len(self.keys) != count // self.block_tokens:
            message = f"{len(self.keys)} keys; {count} tokens have {count // self.block_tokens} full blocks of {self.block_tokens}"
            raise InvalidRequest(f"keys has {message}", param="keys")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold `token_ids`, the last possibly partial."""
        return blocks_for(len(self.token_ids), self.block_tokens)

    @property
    def num_top(self) -> int | None:
        """How many log-probabilities are wanted in the place of each token of the prompt. None: none, or they have been sent before."""
        return None if self.continues else self.params.prompt_logprobs

    @property
    def reusable_blocks(self) -> int:
        """How many of its blocks need not be computed where they are in the pool. Its last token's logits are always wanted; where those of
        all its tokens are, all are computed."""
        return 0 if self.num_top is not None else (self.num_tokens - 1) // self.block_tokens

    @property
    def first_position(self) -> int:
        """Output position of the next token."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def continues(self) -> bool:
        """An earlier attempt has already sent tokens of this request."""
        return self.first_position > 0


@value_class(frozen=True, slots=True)
class PrefillStart:
    """The attempt's first token is wanted, and its KV at the decode node's store."""

    request: Request
    decode_store_address: str
    """Empty: it stays where it is computed, for this very engine decodes it."""
    decode_store_node_id: NodeId
    ttft_budget_ms: float
    """Allowed from now on; 0 for none. The local order of chunks follows it."""
    sources: tuple[PrefixSource, ...] = ()
    """Where more of the prefix lies than here, best first."""

    @property
    def stays(self) -> bool:
        """Nothing is handed over."""
        return not self.decode_store_address


@value_class(frozen=True, slots=True)
class DecodeStart:
    """An order to a decode node: every token of the attempt after its first is wanted, which the prefill side samples."""

    request: Request
    tbt_slo_ms: float
    """Objective of the admission check; 0 for none."""
    inlined: bool = False
    """There is no prefill side: the prompt is computed here, and its first token is wanted too."""
    waits: bool = False
    """There is no prefill side yet: whoever sent this begins it when `DecodeUpdate.reserved` says so. Without it, and not inlined, prefill
    has begun, and an attempt that finds no room at once fails: nobody holds slots at one node while waiting for the other's."""
    refusable: bool = True
    """The admission check may refuse it."""
    expected_tokens: float = 0.0
    """Predicted length of the output still to come: room is kept for it. 0: not known."""
    ttft_budget_ms: float = 0.0
    """The same as of PrefillStart, and so are `sources`; where it is inlined."""
    sources: tuple[PrefixSource, ...] = ()


@value_class(frozen=True, slots=True)
class AbortAttempt:
    """Whatever the node still does or holds for the attempt is to be given up."""

    attempt_id: AttemptId


@value_class(frozen=True, slots=True)
class ForetellTokens:
    """What an attempt is bound to come to: output tokens that the client has from another attempt, whose place it is to take. It computes
    them in one step where it would have taken many."""

    attempt_id: AttemptId
    position: int
    """In the output, of the first of them."""
    token_ids: tuple[int, ...]


PrefillCommand = PrefillStart | AbortAttempt
DecodeCommand = DecodeStart | AbortAttempt | ForetellTokens
