"""xgrammar as vLLM has it, but that it remembers no schema that it has compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xgrammar
from transformers import AutoTokenizer

from benchmarks.drivers.grammar_work import GrammarJob
from benchmarks.drivers.protocol import run

MOST_THREADS = 8
"""With which vLLM has it compile."""


class Xgrammar(GrammarJob[xgrammar.CompiledGrammar, xgrammar.GrammarMatcher]):
    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(arguments)
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(self.directory), vocab_size=self.vocab_size)
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=MOST_THREADS, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        self._mask = self._bits.numpy()

    def compile(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(schema, any_whitespace=True)

    def matcher(self, compiled: xgrammar.CompiledGrammar) -> xgrammar.GrammarMatcher:
        return xgrammar.GrammarMatcher(compiled)

    def mask(self, matcher: xgrammar.GrammarMatcher) -> np.ndarray:
        matcher.fill_next_token_bitmask(self._bits)
        return self._mask

    def take(self, matcher: xgrammar.GrammarMatcher, token_id: int) -> bool:
        return matcher.accept_token(token_id)


if __name__ == "__main__":
    run(Xgrammar, lambda arguments: ({"taken": Xgrammar(arguments).taken()}, None))
