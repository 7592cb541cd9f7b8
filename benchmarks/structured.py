"""What it costs that outputs are held to a JSON schema, and beside vLLM with its xgrammar backend (`make bench-structured`).

vLLM runs with a thread on every core and with one core left to its scheduler and HTTP server; each row shows the better of the two. The
libraries alone, llguidance and xgrammar, are measured on the same schemas and outputs, each on one core.

`make bench-structured ARGS="--libraries"` measures the libraries alone, `--alone` the servers without vLLM; neither writes anything."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from benchmarks.checkpoint import demo_checkpoint
from benchmarks.driven import (
    CHECKOUT,
    OURS,
    PEERS_VLLM,
    Bench,
    Driver,
    Job,
    Scale,
    compared,
    microseconds,
    others_at_work,
    plain,
    rate_of_tokens,
)
from benchmarks.results import Row, ratio_in_words, show, write
from benchmarks.vllm_server import VllmServer, environment, preloaded
from engine.formats.files import describe
from engine.sampling.grammars import GrammarCompiler
from engine.tokenizer.tokenizer import load_tokenizer
from gateway.api_request import FormatKind, OutputFormat
from gateway.grammars import constraint
from tests.support.cluster import Cluster
from tests.support.json_schemas import schemas

ROUNDS = 5
OUTPUT_TOKENS = 128
REQUESTS = {1: 4, 16: 32}
"""By how many run at a time."""
KV_BYTES = 2 << 30
STREET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "lit": {"type": "boolean"}},
    "required": ["name", "lit"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "kind": {"enum": ["town", "village", "city"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        "streets": {"type": "array", "minItems": 40, "items": STREET},
    },
    "required": ["name", "kind", "people", "streets"],
    "additionalProperties": False,
}
"""No output is complete with so few tokens, so that all are of the same length."""
LLGUIDANCE, XGRAMMAR = "llguidance", "xgrammar"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
Case = tuple[dict[str, Any], list[int]]
"""A schema, and the tokens of an output that satisfies it, or of its beginning."""
NOTES_OF_LIBRARIES = (
    "The libraries: llguidance as the engine has it (the gateway's translation of a schema, the engine's limits), xgrammar as vLLM has it, "
    "each in a process of its own, kept to one core. Mask: of what may come next, and the token taken in, over outputs that both take. "
    "Compiling: to the first mask, nothing being remembered. llguidance computes no masks ahead, xgrammar most of them when it compiles."
)


def town() -> Case:
    names = itertools.product(("Harbour", "Mill", "Church", "Long"), (True, False))
    streets = [{"name": f"{name} Street", "lit": lit} for name, lit in names]
    said = {"name": "Little Harbour on the Hill", "kind": "town", "people": 12345, "streets": streets * 5}
    return SCHEMA, load_tokenizer(describe(str(demo_checkpoint()))).encode(json.dumps(said), add_special_tokens=False)


def nasty() -> list[Case]:
    """The two hundred schemas of the tests, each with what is drawn of the tokens that may come: of those that are more than spaces, where
    there are any, all alike. The same outputs each time."""
    info = describe(str(demo_checkpoint()))
    tokenizer = load_tokenizer(info)
    compiler, bits = GrammarCompiler(tokenizer, info), allocate_token_bitmask(1, info.vocab_size)
    told = np.array([bool(tokenizer.token_bytes(token_id).strip()) for token_id in range(info.vocab_size)])
    told[list(info.eos_token_ids)] = False
    cases = list[Case]()
    for name, schema in schemas():
        matcher, dice, output = compiler.compile(constraint(_json_schema(schema))).deep_copy(), random.Random(name), list[int]()
        while len(output) < OUTPUT_TOKENS and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, bits)
            allowed = np.unpackbits(bits.view(np.uint8)[0], count=info.vocab_size, bitorder="little").astype(bool)
            among = np.flatnonzero(allowed & told)
            if not len(among):
                break
            output.append(int(dice.choice(among)))
            matcher.consume_token(output[-1])
        cases.append((schema, output))
    return cases


def _json_schema(schema: dict[str, Any]) -> OutputFormat:
    return OutputFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))


def taken_by_xgrammar(cases: Sequence[Case], directory: Path) -> list[Case]:
    """Those whose output it takes for one of the schema, too."""
    file = directory / "all.json"
    file.write_text(json.dumps(cases))
    command = [str(PEERS_VLLM), "-m", "benchmarks.drivers.grammar_xgrammar", "target", str(demo_checkpoint()), str(file)]
    said = subprocess.check_output(command, env={**os.environ, **OFFLINE}, stdin=subprocess.DEVNULL, cwd=CHECKOUT)
    return list(itertools.compress(cases, json.loads(said)["taken"]))


def library_rows() -> tuple[list[Row], str]:
    """What a mask and a compilation take, and a note."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        nasties = taken_by_xgrammar(hundreds := nasty(), Path(scratch))
        for name, cases, times in (("a town", [town()], 20), (f"{len(nasties)} nasty schemas", nasties, 1)):
            file = Path(scratch, "cases.json")
            file.write_text(json.dumps(cases))
            given = (str(demo_checkpoint()), str(file))
            ours = Driver(LLGUIDANCE, "grammar_llguidance", OURS, given, pinned=True)
            peer = Driver(XGRAMMAR, "grammar_xgrammar", PEERS_VLLM, given, OFFLINE, pinned=True)
            masks = sum(len(output) for _, output in cases)
            scales = {"mask": microseconds(masks), "compile": Scale("ms", 0.0, 1e3 / len(cases))}
            with Bench([Job(ours, len(cases), masks)], [Job(peer, len(cases), masks)]) as bench:
                for operation, what in (("mask", "mask of a token"), ("compile", "compiling a schema")):
                    seconds = bench.rounds(operation, times, ROUNDS)
                    mine, theirs = seconds[LLGUIDANCE], seconds[XGRAMMAR]
                    rows.append(compared(f"{what}, {name}", scales[operation], mine, theirs, XGRAMMAR, None))
    return rows, f"{NOTES_OF_LIBRARIES} Of the {len(hundreds)} nasty schemas xgrammar takes the outputs of {len(nasties)}."


def seconds(url: str, at_a_time: int, seeds: Iterator[int], *, held: bool) -> float:
    """For all requests together."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}} if held else {"ignore_eos": True}

    def ask(seed: int) -> None:
        messages = [{"role": "user", "content": f"Describe town number {seed} in JSON."}]
        body = {"model": model, "messages": messages, "temperature": 1.0, "seed": seed, "max_tokens": OUTPUT_TOKENS, **form}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] == OUTPUT_TOKENS, reply

    with ThreadPoolExecutor(at_a_time) as threads:
        wanted = list(itertools.islice(seeds, REQUESTS[at_a_time]))
        began = time.perf_counter()
        list(threads.map(ask, wanted))
        return time.perf_counter() - began


def _thread_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return [cores, cores - 1] if cores > 1 else [cores]


def _vllm(threads: int) -> VllmServer:
    variables = environment(sorted(os.sched_getaffinity(0))[:threads], KV_BYTES)
    return VllmServer(demo_checkpoint(), variables, ("--structured-outputs-config.backend", "xgrammar"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without vLLM; nothing is written")
    parser.add_argument("--libraries", action="store_true", help="llguidance and xgrammar by themselves; nothing is written")
    options = parser.parse_args(arguments)
    alone = options.alone
    if options.libraries:
        rows, note = library_rows()
        show("Libraries", rows)
        print(note)
        return
    seeds, rows = itertools.count(1), list[Row]()
    notes = [f"SmolLM2-135M-Instruct, bfloat16, temperature 1, {OUTPUT_TOKENS} tokens of output, {ROUNDS} rounds.", others_at_work()]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Cluster()).url
        peers = dict[int, VllmServer]()
        if not alone:
            peers = {threads: stack.enter_context(_vllm(threads)) for threads in _thread_counts()}
            notes.append(f"vLLM with {preloaded()}; a row shows the better of {' and '.join(map(str, peers))} threads.")
        for at_a_time, held in itertools.product(REQUESTS, (False, True)):
            name = f"{'held to a schema' if held else 'free'}, {at_a_time} at a time"
            scale = rate_of_tokens(REQUESTS[at_a_time] * OUTPUT_TOKENS)
            mine, theirs = list[float](), {threads: list[float]() for threads in peers}
            for counted in (False, *[True] * ROUNDS):  # the first of each warms up
                took = seconds(ours, at_a_time, seeds, held=held)
                if counted:
                    mine.append(took)
                for threads, vllm in peers.items():
                    with vllm.at_work() as url:
                        took = seconds(url, at_a_time, seeds, held=held)
                    if counted:
                        theirs[threads].append(took)
            if not peers:
                rows.append(plain(name, scale.unit, [scale.figure(one) for one in mine]))
                continue
            best = min(theirs, key=lambda threads: statistics.median(theirs[threads]))
            rows.append(compared(name, scale, mine, theirs[best], "vLLM", 1.0 if held else None))
            shown = ", ".join(f"{scale.figure(statistics.median(took)):.1f} with {threads}" for threads, took in theirs.items())
            print(
                f"{name}: {rows[-1].ours:.1f} {scale.unit}; vLLM {shown} threads; ratio {ratio_in_words(rows[-1].ratio, 'vLLM')}",
                flush=True,
            )
    if alone:
        for row in rows:
            print(f"{row.label}: {row.ours:.1f} {row.unit} {row.spread}")
        return
    of_libraries, note = library_rows()
    show("Libraries", of_libraries)
    headlines = [row.label for row in rows if row.wanted is not None]
    print(write("structured", "make bench-structured", [*rows, *of_libraries], " ".join(filter(None, [*notes, note])), headlines))


if __name__ == "__main__":
    main(sys.argv[1:])
