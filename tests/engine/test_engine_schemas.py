"""Two hundred JSON schemas, and outputs of a small vocabulary at random: whatever is finished satisfies them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import SamplingRow
from engine.formats.files import describe
from engine.sampling.grammars import Grammars
from engine.sampling.sampler import Sampler
from engine.tokenizer.tokenizer import load_tokenizer
from gateway.api_request import FormatKind, OutputFormat
from gateway.grammars import constraint
from springtide.protocol.outputs import Finish, SampledToken, finish_of
from springtide.protocol.sampling import SamplingParams
from tests.support.json_schemas import check, schemas
from tests.support.models import make_tiny_llama

BATCH = 20


@pytest.mark.parametrize("first", range(0, 200, BATCH))
def test_whatever_is_finished_satisfies_its_schema(tiny: Path, first: int) -> None:
    info, batch = describe(str(tiny)), schemas()[first : first + BATCH]
    tokenizer, sampler, noise = load_tokenizer(info), Sampler(info, Grammars(info)), np.random.default_rng(first)
    params = [
        SamplingParams(seed=seed, max_tokens=600, grammar=constraint(OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))))
        for seed, (_, schema) in enumerate(batch)
    ]
    rows, finished = [SamplingRow(one, (1,), list[int]()) for one in params], dict[int, Finish]()
    endings = [token for text in '"}],' for token in tokenizer.encode(text)]
    while running := [index for index in range(BATCH) if index not in finished]:
        logits = torch.from_numpy(noise.standard_normal((len(running), info.vocab_size), np.float32))
        logits[:, endings] += 3
        for index, drawn in zip(running, sampler.sample(logits, [rows[index] for index in running]), strict=True):
            assert isinstance(drawn, SampledToken), (batch[index][0], drawn)
            output = rows[index].output_ids
            assert isinstance(output, list)
            finish = finish_of(drawn.token_id, len(output) + 1, params[index], info.eos_token_ids)
            if finish is not Finish.STOP:
                output.append(drawn.token_id)
            if finish is not None:
                finished[index] = finish
    for index, finish in finished.items():
        name, schema = batch[index]
        if finish is Finish.STOP:
            text = tokenizer.decode(rows[index].output_ids)
            try:
                check(text, schema)
            except Exception as error:
                pytest.fail(f"{name}: {text!r} does not satisfy {json.dumps(schema)}: {error}")
    assert sum(finish is Finish.STOP for finish in finished.values()) >= BATCH // 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_llama(path)
    return path
