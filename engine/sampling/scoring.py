"""How likely each token of a prompt was, and which others would have been: from logits to log-probabilities in columns.

Logits of a prompt are vocabulary times tokens: they are asked for, and forgotten, in pieces of some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.batch import Scoring
from engine.device.memory import upload
from springtide.protocol.outputs import PromptLogprobs

_MOST_ELEMENTS = 4 << 20
"""Of the logits of a piece: 16 MiB."""
_BLOCK = 64


def score(logits_between: Callable[[int, int], torch.Tensor], begin: int, wanted: Scoring, vocab_size: int) -> PromptLogprobs:
    """Scores the tokens that follow each of a chunk's, of which the rows are those from `begin` on; `logits_between` gives float32 logits
    [rows, vocab] of a span of rows."""
    rows = max(1, _MOST_ELEMENTS // vocab_size)
    parts = []
    with torch.inference_mode():
        for first in range(0, len(wanted.next_ids), rows):
            next_ids = wanted.next_ids[first : first + rows]
            logits = logits_between(begin + first, begin + first + len(next_ids))
            parts.append(_scored(logits, next_ids, wanted.num_top))
    return PromptLogprobs.joined(parts)


def _scored(logits: torch.Tensor, next_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    logprobs = torch.log_softmax(logits, -1)
    (columns,) = upload([next_ids], logits.device)
    own = logprobs.gather(1, columns[:, None])
    # Ones summed in float32, exact up to 2^24 of them: a sixth of the time that summing what is true takes.
    ranks = torch.ge(logprobs, own, out=torch.empty_like(logprobs)).sum(-1)
    values, ids = _likeliest(logprobs, min(num_top, logits.shape[1]))
    float32, int32 = torch.float32, torch.int32
    return PromptLogprobs(_packed(own, float32), _packed(ranks, int32), _packed(ids, int32), _packed(values, float32))


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and ids [rows, count] of the likeliest tokens, in falling order. They are in the `count` blocks of tokens whose maxima are
    the greatest: to find these takes a twentieth of the time of looking for tokens among all."""
    short = -logprobs.shape[1] % _BLOCK
    blocks = torch.nn.functional.pad(logprobs, (0, short), value=-torch.inf).view(len(logprobs), -1, _BLOCK)
    best = torch.topk(blocks.amax(-1), min(count, blocks.shape[1])).indices[..., None]
    candidates = blocks.gather(1, best.expand(-1, -1, _BLOCK)).flatten(1)
    ids = (best * _BLOCK + torch.arange(_BLOCK, device=best.device)).flatten(1)
    values, places = torch.topk(candidates, count)
    return values, ids.gather(1, places)


def _packed(values: torch.Tensor, dtype: torch.dtype) -> bytes:
    return values.to("cpu", dtype).contiguous().numpy().tobytes()
