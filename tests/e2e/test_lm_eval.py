"""EleutherAI's lm-eval, unmodified, scores a task that is made on the spot as transformers does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import yaml

from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import Reference

CLIENTS = os.environ.get("CLIENTS", "")
LM_EVAL = f"{CLIENTS}/bin/lm_eval"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLIENTS, reason="wants an environment of its own: make test-clients"),
]
QUESTIONS = [
    ("The sea is", [" blue", " a kind of very tall tree", " wet"]),
    ("Two and two make", [" four.", " the moon", " s"]),
    ("Say it:", [" wörld", " 🙂🙂", " no"]),
]
TASK = {
    "task": "tiny_choices",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "target_delimiter": "",
    "doc_to_target": "{{0}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def loglikelihood(reference: Reference, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Of a continuation, and whether it is what greedy decoding would give."""
    rows = reference.logits([*context, *continuation]).log_softmax(-1)[len(context) - 1 : -1]
    own = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    return sum(own), all(int(row.argmax()) == token for row, token in zip(rows, continuation, strict=True))


def test_the_loglikelihoods_of_a_task_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny", num_hidden_layers=3)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": question, "choices": choices}) + "\n" for question, choices in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "tiny.yaml").write_text(yaml.safe_dump({**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}))
    with Cluster(model=str(model), dtype="float32", profile=TINY_PROFILE) as cluster:
        arguments = {
            "base_url": f"{cluster.url}/v1/completions",
            "model": cluster.model,
            "tokenizer": str(model),
            "tokenizer_backend": "huggingface",
            "num_concurrent": "4",
        }
        command = [LM_EVAL, "run", "--model", "local-completions", "--tasks", "tiny_choices", "--include_path", str(tasks)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
        command += ["--log_samples", "--output_path", str(tmp_path / "results")]
        alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""}
        run = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout + run.stderr

    (samples,) = (tmp_path / "results").rglob("samples_tiny_choices_*.jsonl")
    reference, tokenizer = Reference.from_directory(model), tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    seen = 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        question, choices = QUESTIONS[sample["doc_id"]]
        context = tokenizer.encode(question).ids
        for choice, ((logprob, greedy),) in zip(choices, sample["resps"], strict=True):
            wanted = loglikelihood(reference, context, tokenizer.encode(question + choice).ids[len(context) :])
            assert abs(float(logprob) - wanted[0]) < 1e-3 and str(greedy) == str(wanted[1])
            seen += 1
    assert seen == 9
