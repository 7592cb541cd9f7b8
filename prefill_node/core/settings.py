"""What a prefill group's decisions depend on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prefill_node.core.layer_stream import LayerGroups
from springtide.chunking import Chunking


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """What a prefill group is told when it is made. `chunking`: by the cost model as it was measured. `answer_s`: within which a store that
    lives answers by itself."""

    chunking: Chunking
    layer_groups: LayerGroups
    block_tokens: int
    eos_token_ids: Collection[int]
    num_stages: int = 1
    answer_s: float = 2.5
