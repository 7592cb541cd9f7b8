"""Questions about documents that many ask about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.workload.draft import Draft, arrival_times, lengths
from simulator.workload.options import GeneratorOptions


@dataclass(frozen=True, kw_only=True)
class Documents(GeneratorOptions):
    """Prompts of a document and a question. The n-th most popular document is asked about in proportion to n to the power of
    -`zipf_exponent`.

    Document and answer are on average as long as prompts and outputs of L-Eval in the Mooncake paper (arXiv 2407.00079, table 2: 19,019
    and 72 tokens). A hundred documents, Zipf's own exponent of 1, and questions of 64 tokens are our choice."""

    documents: int = 100
    zipf_exponent: float = 1.0
    document_tokens: float = 19_019.0
    document_cv: float = 0.7
    question_tokens: float = 64.0
    question_cv: float = 0.7
    output_tokens: float = 72.0
    output_cv: float = 0.73
    max_input_tokens: int = 131_072
    max_output_tokens: int = 4096

    @classmethod
    def may_be_0(cls) -> frozenset[str]:
        return super().may_be_0() | {"zipf_exponent"}

    def draw(self, rng: np.random.Generator, draft: Draft, rate_per_s: float, duration_s: float) -> None:
        longest = max(self.max_input_tokens // 2, 1)
        sizes = lengths(rng, self.document_tokens, self.document_cv, self.documents, longest).tolist()
        texts = [draft.take_ids(size // draft.block_tokens) for size in sizes]
        # Only now, so that the documents of a seed are the same whatever the rate.
        times_s = arrival_times(rng, [0.0, duration_s], [rate_per_s])
        weights = np.arange(1, self.documents + 1) ** -float(self.zipf_exponent)
        asked = rng.choice(self.documents, size=len(times_s), p=weights / weights.sum()).tolist()
        questions = lengths(rng, self.question_tokens, self.question_cv, len(times_s), longest).tolist()
        outputs = lengths(rng, self.output_tokens, self.output_cv, len(times_s), self.max_output_tokens).tolist()
        for arrival_s, document, question, output_tokens in zip(times_s, asked, questions, outputs, strict=True):
            draft.add_after(texts[document], arrival_s, sizes[document] + question, output_tokens)
