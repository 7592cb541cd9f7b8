"""From logits to tokens for all rows of a batch together, as a device likes it: what engine.sampling.sampler does row by row on a CPU.

What is in the batch beside a row makes no difference to it: equal tokens are sorted by their ids, where torch's topk would order them by
how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from engine.device.memory import upload, upload_floats
from springtide.protocol.outputs import SampledToken, TokenLogprob
from springtide.protocol.sampling import SamplingParams

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""What is smaller, a device may take for 0."""


def sample_together(logits: torch.Tensor, every: Sequence[SamplingParams], draws: Sequence[float]) -> list[SampledToken]:
    """Draws one token for each row of `logits`, float32 [rows, vocab], in which masks, bias and penalties are: the likeliest of rows that
    are greedy; of those without filters the one at the row's number of `draws` in the cumulative distribution, in the order of the
    vocabulary; of those with filters the winner of a race among the tokens that are left. The host waits for one copy, of all of them."""
    tokens = torch.argmax(logits, -1)
    drawn = [index for index, params in enumerate(every) if not params.greedy]
    if drawn:
        settings = [(params.temperature, params.top_k, params.top_p, params.min_p) for params in (every[index] for index in drawn)]
        columns = upload_floats([*zip(*settings, strict=True), [draws[index] for index in drawn]], logits.device)
        temperature, top_k, top_p, min_p, draw = columns[..., None]
        (rows,) = upload([drawn], logits.device)
        probabilities = at_temperature(logits[rows], temperature.float())
        if any(_has_filters(every[index]) for index in drawn):
            tokens[rows] = _among_likeliest(probabilities, top_k, top_p, min_p, draw)
        else:
            tokens[rows] = at(probabilities, draw)[:, 0]
    return _to_host(logits, every, tokens)


def at_temperature(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """The probabilities of `logits` [..., vocab], float32, at any temperature above 0. Towards 0 the likeliest token's becomes 1: what
    grows beyond all bounds is the others' distance from it, whose exponential is 0, where logits themselves would end in NaN."""
    distances = logits - logits.max(-1, keepdim=True).values
    if isinstance(temperature, torch.Tensor):
        return torch.softmax(distances / temperature.clamp_min(_LEAST_TEMPERATURE), -1)
    return torch.softmax(distances / max(temperature, _LEAST_TEMPERATURE), -1)


def _has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _among_likeliest(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, draw: torch.Tensor
) -> torch.Tensor:
    """The tokens that `draw` gives of `probabilities` [rows, vocab] among those that the filters leave; in rows without filters, among
    all. The others are [rows, 1], float64; a `top_k` of 0 is none."""
    vocab = probabilities.shape[1]
    likeliest, tokens = torch.sort(probabilities, descending=True, stable=True)
    in_top_k = torch.arange(vocab, device=top_k.device) < torch.where(top_k > 0, top_k, vocab)
    # top-p is a share of what top-k has left.
    whole = torch.where(top_k > 0, (likeliest * in_top_k).double().sum(-1, keepdim=True), 1.0)
    before = likeliest.double().cumsum(-1) - likeliest
    keep = in_top_k & (before < top_p * whole) & (likeliest >= min_p.float() * likeliest[:, :1])
    keep[:, 0] = True
    winners = tokens.gather(1, race_winner(likeliest * keep, tokens, number(draw)))
    unfiltered = (top_k == 0) & (top_p == 1.0) & (min_p == 0.0)
    return torch.where(unfiltered, at(probabilities, draw), winners)[:, 0]


def at(probabilities: torch.Tensor, draw: torch.Tensor | float) -> torch.Tensor:
    """The index [..., 1] at `draw`, in [0, 1), of the cumulative distribution of `probabilities` [..., vocab], whose sum is about 1."""
    cumulative = probabilities.double().cumsum(-1)
    return torch.searchsorted(cumulative, draw * cumulative[..., -1:], right=True)


def race_winner(probabilities: torch.Tensor, token_ids: torch.Tensor, first: torch.Tensor | int) -> torch.Tensor:
    """The index [..., 1] of one of the tokens `token_ids` [..., count], drawn in proportion to their `probabilities`: of the first to
    arrive when each takes an exponential time of that rate. A token's time comes from a number of its own, the one at its id in the
    SplitMix64 sequence (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) that begins at `first`. So neither the
    order of the tokens nor whether another one is left matters: rounding, which may decide either, changes the winner only where two
    arrive together, or where it is the winner that is left or not."""
    bits = (token_ids * _signed(0x9E3779B97F4A7C15)).add_(first)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 31))
    # 52 bits and a half are exact in float64, above 0 and below 1.
    times = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()
    return torch.argmax(times.reciprocal_().mul_(probabilities), -1, keepdim=True)


def number(draw: torch.Tensor | float) -> torch.Tensor | int:
    """A number of the sampler's, in [0, 1) with 53 bits, as the whole number of them."""
    return (draw * 2.0**53).long() if isinstance(draw, torch.Tensor) else int(draw * 2.0**53)


def _signed(word: int) -> int:
    """As torch has it, whose int64 wraps around as an unsigned word does."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, zeros from the left: torch's own copies the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _to_host(logits: torch.Tensor, every: Sequence[SamplingParams], tokens: torch.Tensor) -> list[SampledToken]:
    """With the log-probabilities that are asked for, in one copy: ids of tokens are exact in float64."""
    wanted = [(index, min(params.logprobs, logits.shape[1])) for index, params in enumerate(every) if params.logprobs is not None]
    if not wanted:
        return [SampledToken(token) for token in tokens.tolist()]
    most = max(count for _, count in wanted)
    (rows,) = upload([[index for index, _ in wanted]], logits.device)
    logprobs = torch.log_softmax(logits[rows], -1)
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    own = logprobs.gather(1, tokens[rows, None])
    table = torch.cat((own, values[:, :most], ids[:, :most]), 1).double()
    packed = torch.cat((tokens.double(), table.flatten())).cpu()
    sampled = [SampledToken(token) for token in packed[: len(every)].long().tolist()]
    for (index, count), (logprob, *tops) in zip(wanted, packed[len(every) :].view(len(wanted), -1).tolist(), strict=True):
        likeliest = zip(tops[:count], tops[most : most + count], strict=True)
        top = tuple(TokenLogprob(int(token), value) for value, token in likeliest if value > -inf)
        sampled[index] = SampledToken(sampled[index].token_id, logprob, top)
    return sampled
