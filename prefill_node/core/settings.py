"""What a prefill group's decisions depend on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prefill_node.core.layer_stream import LayerGroups
from springtide.chunking import Chunking


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """What a prefill group is told when it is made. `chunking`: by the cost model as it was measured. `answer_s`: within which a store that
    lives answers by itself. `idle_slowdown`: by how much idle work of the machine's other engines may lengthen a pass.
    `breaks_off`: passes of idle work can be broken off for others, who wait for their end otherwise. Where several processes compute them,
    each would have to hear of it before the same layer."""

    chunking: Chunking
    layer_groups: LayerGroups
    block_tokens: int
    eos_token_ids: Collection[int]
    num_stages: int = 1
    answer_s: float = 2.5
    idle_slowdown: float = 0.05
    breaks_off: bool = True
    mixes: bool = False
    """Passes are launched when they are asked for (`PrefillCore.launch`): a decode node's steps are computed with them."""
