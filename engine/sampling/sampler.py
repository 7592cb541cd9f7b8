"""From logits to tokens.

A row's token depends on its logits, its parameters and (seed, output position) alone: not on what else is in the batch nor on what was
drawn before. A request that is scheduled anew after a failure therefore goes on as it would have.

The filters come in the order of transformers' logits processors: what is not allowed, bias, penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from math import inf
from types import MappingProxyType

import numpy as np
import torch

from engine.batch import SamplingRow
from engine.device.memory import upload, upload_floats
from engine.sampling.constraints import Constraints, TokenMask
from engine.sampling.device_sampling import at, at_temperature, number, race_winner, sample_together
from engine.sampling.grammars import Grammars
from springtide.modelinfo import ModelInfo
from springtide.protocol.outputs import Failure, SampledToken, TokenLogprob
from springtide.protocol.sampling import SamplingParams

_FIRST_CANDIDATES = 1024
"""How many of the likeliest tokens top-p and min-p look at first; all of them when these do not suffice."""


Draw = Callable[[torch.Tensor, Sequence[SamplingRow]], Sequence[SampledToken | Failure]]
"""What draws a token for each row of logits, as `sample` does, and a Sampler's."""
_NO_MASKS: Mapping[int, TokenMask] = MappingProxyType({})


class Sampler:
    """Samples step after step what is held to grammars, too, of which it keeps how far they have been followed. For one thread."""

    def __init__(self, info: ModelInfo, grammars: Grammars) -> None:
        """`grammars`: whoever hears of one before it is sampled by has it compiled there."""
        self._constraints = Constraints(info.vocab_size, info.eos_token_ids, grammars)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken | Failure]:
        """Draws as `sample` does, among the tokens that may come next. A row that cannot go on has a Failure, and is in nobody's way."""
        if not any(row.params.constrained for row in rows):
            return list(sample(logits, rows))
        allowed = self._constraints.allowed(rows)
        sampled: list[SampledToken | Failure] = list(sample(logits, rows, allowed.masks))
        for index, failure in allowed.refused.items():
            sampled[index] = failure
        return sampled


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], masks: Mapping[int, TokenMask] = _NO_MASKS) -> list[SampledToken]:
    """Draws one token for each row of `logits`, float32 [rows, vocab], which is left as it is. `masks`, by index of the row, [vocab]: True
    for the tokens that it may get. Log-probabilities are those after masks, bias and penalties, before temperature: tokens that a row may
    not get have none. On a device all rows are drawn together; on a CPU, whose caches hold one row, one by one."""
    if len(rows) != len(logits):
        raise ValueError(f"{len(rows)} sampling rows for {len(logits)} rows of logits")
    with torch.inference_mode():
        adjusted = _adjusted(logits, rows, masks)
        if logits.device.type != "cpu":
            draws = [0.0 if row.params.greedy else uniform(row.params.seed, len(row.output_ids)) for row in rows]
            return sample_together(adjusted, [row.params for row in rows], draws)
        # NumPy's takes a tenth of the time that torch's does.
        tokens = adjusted.numpy().argmax(-1).tolist() if any(row.params.greedy for row in rows) else [0] * len(rows)
        for index, row in enumerate(rows):
            if not row.params.greedy:
                tokens[index] = _draw(adjusted[index], row.params, uniform(row.params.seed, len(row.output_ids)))
        return _with_logprobs(adjusted, rows, tokens)


def uniform(seed: int, position: int) -> float:
    """The one random number, in [0, 1), behind the token at output `position`."""
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(message, digest_size=8, person=b"springtide-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def _adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow], masks: Mapping[int, TokenMask]) -> torch.Tensor:
    """With masks, bias and penalties; the same tensor where nobody asks for any."""
    changed = [index for index, row in enumerate(rows) if _changes_logits(row.params)]
    if not changed and not masks:
        return logits
    adjusted = logits.clone()
    if masks:
        forbidden = torch.from_numpy(~np.stack(list(masks.values())))
        if logits.device.type == "cpu":
            for index, row in zip(masks, forbidden, strict=True):
                adjusted[index].masked_fill_(row, -torch.inf)
        else:
            (places,) = upload([list(masks)], logits.device)
            adjusted[places] = adjusted[places].masked_fill(forbidden.pin_memory().to(logits.device, non_blocking=True), -torch.inf)
    for index in changed:
        _adjust(adjusted[index], rows[index])
    return adjusted


def _changes_logits(params: SamplingParams) -> bool:
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return penalties or bool(params.logit_bias)


def _adjust(logits: torch.Tensor, row: SamplingRow) -> None:
    """In place, [vocab]."""
    params, device = row.params, logits.device
    if params.logit_bias:
        token_ids, biases = params.logit_bias.columns()
        (biased,) = upload([token_ids], device)
        logits.index_add_(0, biased, upload_floats([biases], device)[0].float())
    if params.repetition_penalty != 1.0:
        (seen,) = upload([np.unique(np.concatenate((_array(row.prompt_ids), _array(row.output_ids))))], device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.output_ids and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = upload(np.unique(_array(row.output_ids), return_counts=True), device)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[tokens] -= penalty.float()


def _array(token_ids: Sequence[int]) -> np.ndarray:
    return np.asarray(token_ids, dtype=np.int64)


def _draw(logits: torch.Tensor, params: SamplingParams, draw: float) -> int:
    """The token that `draw` gives of `logits` [vocab], as `sample_together` says."""
    probabilities = at_temperature(logits, params.temperature)
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return int(at(probabilities, draw))
    kept, tokens = _filtered(probabilities, params)
    return int(tokens[race_winner(kept, tokens, number(draw))])


def _filtered(probabilities: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities (not normalised) and ids of the tokens that top-k, top-p and min-p leave, the likeliest first."""
    vocab = len(probabilities)
    count = min(params.top_k or _FIRST_CANDIDATES, vocab)
    while True:
        candidates, tokens = torch.topk(probabilities, count)
        # top-p is a share of what top-k has left.
        whole = float(candidates.double().sum()) if params.top_k else 1.0
        before = candidates.double().cumsum(-1) - candidates
        keep = (before < params.top_p * whole) & (candidates >= params.min_p * candidates[0])
        if params.top_k or count == vocab or not keep[-1]:
            keep[0] = True
            return candidates[keep], tokens[keep]
        count = vocab


def _with_logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: list[int]) -> list[SampledToken]:
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    sampled = [SampledToken(token) for token in tokens]
    if not wanted:
        return sampled
    logprobs = torch.log_softmax(logits[wanted], -1)
    for index, row_logprobs in zip(wanted, logprobs, strict=True):
        values, ids = torch.topk(row_logprobs, min(rows[index].params.logprobs or 0, len(row_logprobs)))
        top = tuple(TokenLogprob(token, value) for token, value in zip(ids.tolist(), values.tolist(), strict=True) if value > -inf)
        sampled[index] = SampledToken(tokens[index], float(row_logprobs[tokens[index]]), top)
    return sampled
