"""llguidance as the engine has it: schemas in the gateway's translation, compiled with the engine's bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from benchmarks.drivers.grammar_work import GrammarJob
from benchmarks.drivers.protocol import run
from engine.formats.files import describe
from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from gateway.api_request import FormatKind, OutputFormat
from gateway.grammars import constraint


class Llguidance(GrammarJob[LLMatcher, LLMatcher]):
    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(arguments)
        info = describe(str(self.directory))
        self._compiler = GrammarCompiler(load_tokenizer(info), info)
        self._bits = allocate_token_bitmask(1, self.vocab_size)

    def compile(self, schema: str) -> LLMatcher:
        return self._compiler.compile(constraint(OutputFormat(FormatKind.JSON_SCHEMA, schema)))

    def matcher(self, compiled: LLMatcher) -> LLMatcher:
        return compiled.deep_copy()

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        fill_next_token_bitmask(matcher, self._bits)
        return self._bits

    def take(self, matcher: LLMatcher, token_id: int) -> bool:
        return matcher.consume_token(token_id)


if __name__ == "__main__":
    run(Llguidance)
