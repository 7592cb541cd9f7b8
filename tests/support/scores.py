"""What log-probabilities of a prompt have to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from springtide.protocol.outputs import PromptLogprobs
from tests.support.reference import Reference

TOLERANCE = 1e-4


def assert_scores_are_those_of(reference: Reference, prompt: Sequence[int], scores: PromptLogprobs, num_top: int) -> None:
    """Asserts that they are transformers'. Tokens whose log-probabilities are closer than rounding may come in any order."""
    wanted = torch.log_softmax(reference.logits(prompt)[:-1], -1).numpy()
    own, ranks, top_ids, tops = scores.columns()
    rows = np.arange(len(prompt) - 1)
    assert len(scores) == len(rows) and top_ids.shape == tops.shape == (len(rows), num_top if len(rows) else 0)
    expected = wanted[rows, list(prompt[1:])]
    assert np.abs(own - expected).max(initial=0.0) < TOLERANCE
    at_least = (wanted >= expected[:, None] + TOLERANCE).sum(-1)
    at_most = (wanted >= expected[:, None] - TOLERANCE).sum(-1)
    assert ((at_least < ranks) & (ranks <= at_most)).all()
    if len(rows) and num_top:
        assert np.abs(tops - -np.sort(-wanted, -1)[:, :num_top]).max() < TOLERANCE
        assert np.abs(tops - np.take_along_axis(wanted, top_ids, -1)).max() < TOLERANCE
        assert all(len(set(ids)) == num_top for ids in top_ids.tolist())
