"""How likely each token of a prompt is: in float32 as transformers has it, however the prompt is cut up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.backends.native_cpu import attention
from engine.batch import Scoring, SequenceChunk
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.sampling import scoring
from engine.sampling.scoring import score
from springtide.protocol.outputs import PromptLogprobs
from tests.engine.conftest import TinyFactory
from tests.engine.sequences import Harness
from tests.engine.test_engine_native import needs_kernels
from tests.engine.test_engine_tensor_parallel import shared_out
from tests.support.models import make_tiny_llama, make_tiny_model
from tests.support.reference import Reference, random_prompt
from tests.support.scores import assert_scores_are_those_of


def scored(harness: Harness, prompt: Sequence[int], chunk: int, num_top: int) -> PromptLogprobs:
    """Of a prompt that is computed in chunks."""
    harness.foul()
    slots, runner, parts = harness.slots(len(prompt)), harness.runner, []
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        last = end == len(prompt)
        batch = [SequenceChunk(prompt[begin:end], begin, slots, wants_logits=last, wants_all=True)]
        hidden = runner.forward_layers(batch, None)
        wanted = Scoring(prompt[begin + 1 : end + 1], num_top)
        parts.append(score(partial(runner.logits_between, hidden), 0, wanted, runner.model.config.vocab_size))
    return PromptLogprobs.joined(parts)


@pytest.mark.parametrize("vocab_size", [320, 333])
@pytest.mark.parametrize("num_top", [0, 1, 5, 400])
def test_a_prompt_in_any_chunks_is_scored_as_transformers_does(tiny: TinyFactory, vocab_size: int, num_top: int) -> None:
    harness, reference = tiny(vocab_size=vocab_size)
    for length in (1, 2, 17, 150):
        prompt = random_prompt(length, length, 10, 250)
        for chunk in (1, 16, 41, 150):
            assert_scores_are_those_of(reference, prompt, scored(harness, prompt, chunk, num_top), min(num_top, vocab_size))


def test_the_demo_model_scores_as_transformers_does(demo_fp32: Harness, demo_reference: Reference) -> None:
    prompt = random_prompt(5, 200)
    assert_scores_are_those_of(demo_reference, prompt, scored(demo_fp32, prompt, 64, 5), 5)


def test_logits_are_made_in_pieces(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, reference = tiny()
    prompt = random_prompt(1, 50, 10, 250)
    monkeypatch.setattr(scoring, "_MOST_ELEMENTS", 3 * 320 + 1)
    spans: list[tuple[int, int]] = []
    between = ModelRunner.logits_between

    def noting(runner: ModelRunner, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        spans.append((begin, end))
        return between(runner, hidden, begin, end)

    monkeypatch.setattr(ModelRunner, "logits_between", noting)
    scores = scored(harness, prompt, 25, 3)
    assert_scores_are_those_of(reference, prompt, scores, 3)
    assert spans[:9] == [(begin, min(begin + 3, 25)) for begin in range(0, 25, 3)] and spans[-1] == (21, 24)


def test_ranks_run_beside_a_prompt_that_is_scored(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny", vocab_size=321)
    prompt = random_prompt(3, 70, 10, 250)
    reference = Reference.from_directory(path)
    with shared_out(path) as harness:
        for chunk in (33, 70):
            assert_scores_are_those_of(reference, prompt, scored(harness, prompt, chunk, 4), 4)
        harness.foul()
        assert harness.greedy(prompt, 4) == reference.greedy(prompt, 4)


@needs_kernels
def test_with_the_kernels_those_who_want_all_logits_have_the_whole_last_layer_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = describe(str(make_tiny_model(tmp_path / "tiny", "Llama", head_dim=32, num_hidden_layers=3)))
    harness = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), num_slots=60)
    lengths = (200, 40, 90, 1)
    prompts = [[token % info.vocab_size for token in random_prompt(seed, length)] for seed, length in enumerate(lengths)]
    slots = [harness.slots(length) for length in lengths]
    batch = [SequenceChunk(prompt, 0, own, i == 3, i == 1) for i, (prompt, own) in enumerate(zip(prompts, slots, strict=True))]
    hidden = harness.runner.forward_layers(batch, None).clone()
    monkeypatch.setattr(attention, "LEAST_SPARED", 1000)
    whole = harness.runner.forward_layers(batch, None)
    begins = [0, *accumulate(lengths)]
    for i, wanted in enumerate((False, True, False, True)):
        own = slice(begins[i], begins[i + 1])
        close = torch.allclose(hidden[own].float(), whole[own].float(), atol=0.02 * float(whole.abs().max()))
        assert close == wanted, f"sequence {i}"
    assert [chunk.num_wanted for chunk in batch] == [0, 40, 0, 1]


def test_columns_that_do_not_fit_one_another_are_no_scores() -> None:
    one = np.float32(0.0).tobytes()
    for columns in ((one, b""), (one, one, one), (one, one, one, one + one), (b"", b"", one, one), (b"123", b"123")):
        with pytest.raises(ValueError, match="columns"):
            PromptLogprobs(*columns)
    assert len(PromptLogprobs(one, one, one + one, one + one)) == 1 and PromptLogprobs(one, one, one + one, one + one).num_top == 2
