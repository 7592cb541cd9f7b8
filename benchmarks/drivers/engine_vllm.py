"""vLLM's engine in this process, driven step by step; its caching of prefixes is on. Its settings are the defaults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from benchmarks.drivers.engine_work import EngineJob, Settings, TokenIds
from benchmarks.drivers.protocol import run

LONGEST_CONTEXT = 8192


class VllmEngine(EngineJob):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        llm = LLM(str(settings.directory), dtype="bfloat16", max_model_len=LONGEST_CONTEXT, enable_prefix_caching=True)
        self._engine = llm.llm_engine
        self._names = map(str, itertools.count())
        self._held: list[str] = []

    def prefill(self, prompt: TokenIds, cached: int) -> int:
        self._add(prompt, 1)
        while True:
            for output in self._step():
                if output.finished:
                    assert output.num_cached_tokens == cached, f"{output.num_cached_tokens} tokens were cached, not {cached}"
                    return output.outputs[0].token_ids[0]

    def hold(self, prompts: Sequence[TokenIds]) -> TokenIds:
        """Prompts that were held before are computed again from what is cached of them."""
        self._engine.abort_request(self._held)
        self._held = [self._add(prompt, LONGEST_CONTEXT - len(prompt)) for prompt in prompts]
        first: dict[str, int] = {}
        while len(first) < len(prompts):
            for output in self._step():
                first.setdefault(output.request_id, output.outputs[0].token_ids[0])
        return [first[name] for name in self._held]

    def decode(self, steps: int) -> list[TokenIds]:
        tokens: dict[str, TokenIds] = {name: [] for name in self._held}
        for _ in range(steps):
            for output in self._step():
                tokens[output.request_id] += output.outputs[0].token_ids
        assert {len(sequence) for sequence in tokens.values()} == {steps}, "a step did not give every sequence one token"
        return list(tokens.values())

    def _add(self, prompt: TokenIds, most_tokens: int) -> str:
        parameters = SamplingParams(
            temperature=0.0, max_tokens=most_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        name = next(self._names)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return name

    def _step(self) -> list[RequestOutput]:
        return [output for output in self._engine.step() if isinstance(output, RequestOutput)]


if __name__ == "__main__":
    run(lambda arguments: VllmEngine(Settings.from_arguments(arguments)))
