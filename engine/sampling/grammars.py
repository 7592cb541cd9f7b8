"""Grammars of outputs, compiled for a model's vocabulary by llguidance, beside the thread that samples. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from springtide.errors import ConfigError, InvalidRequest
from springtide.modelinfo import ModelInfo
from springtide.protocol.sampling import Grammar

LIMITS = LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)
"""Of one grammar. Fuel and items of a step, at their defaults, are used up within some 15 ms; 20,000 states of a lexer take up to 40 MB."""
MAX_COMPILED = 64
"""So many grammars are kept compiled, those that were used last, and beyond them those that somebody has the future of."""


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe. Raises ConfigError for a model that has no token to end an output with."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        if not info.eos_token_ids:
            raise ConfigError("the model has no end-of-sequence token, with which a constrained output would have to end")
        words = TokenizerWrapper(_Words(tokenizer, info))
        self._vocabulary = LLTokenizer(words, n_vocab=info.vocab_size, eos_token=sorted(info.eos_token_ids))

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of an output, with its first mask made once, so that copies have what that takes. Raises
        InvalidRequest."""
        matcher = LLMatcher(self._vocabulary, grammar.source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            why = error_of(matcher)
            # That nothing can follow, where the text is not whole, is how llguidance has it.
            raise InvalidRequest(
                f"grammar cannot be used: {'no text satisfies it' if why.startswith('NoExtension') else why}", param="grammar"
            )
        return matcher


def error_of(matcher: LLMatcher) -> str:
    """What is wrong, in a line that fits a message."""
    return " ".join(matcher.get_error().split())[:500]


class _Words:
    """A vocabulary as llguidance wants it. Ids that the model has beyond the tokenizer's stand for no bytes, and are never allowed."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(info.eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(info.vocab_size)]
        self.special_token_ids = [token_id for token_id in range(info.vocab_size) if tokenizer.is_special(token_id)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


class Grammars:
    """The compiled grammars of a process. They are compiled one after another on a thread of its own. Thread-safe."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._compiler: Future[GrammarCompiler] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._held: WeakValueDictionary[Grammar, Future[LLMatcher]] = WeakValueDictionary()
        """All that there are, those of the former too."""
        self._lock = threading.Lock()

    def load(self) -> None:
        """Begins to load what grammars are compiled with, unless that has been done. Python's lock is held meanwhile, for up to a second
        with a large vocabulary: who computes at the same time calls it before it serves anybody."""
        with self._lock:
            self._loading()

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begins to compile it, unless it is kept compiled, as it is for as long as somebody holds the future. That raises InvalidRequest,
        or ConfigError where the model has no usable tokenizer; its matcher is to be copied."""
        with self._lock:
            compiled = self._held.get(grammar)
            if compiled is None:
                compiled = self._held[grammar] = self._thread.submit(_compiled, self._loading(), grammar)
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, grammar: Grammar, within_s: float) -> LLMatcher:
        """A matcher at the beginning of an output. Raises TimeoutError, and as `prepare` does."""
        return self.prepare(grammar).result(within_s).deep_copy()

    def close(self) -> None:
        """Compiles nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _loading(self) -> Future[GrammarCompiler]:
        """With the lock."""
        if self._compiler is None:
            self._compiler = self._thread.submit(_load, self._info)
        return self._compiler


def _load(info: ModelInfo) -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(info), info)


def _compiled(compiler: Future[GrammarCompiler], grammar: Grammar) -> LLMatcher:
    # It was submitted before, to the same thread.
    return compiler.result().compile(grammar)
