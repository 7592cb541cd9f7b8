"""A model whose heads and inner dimensions are shared out among processes gives the same tokens, and writes the same slabs."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from engine.backends import choice as backends
from engine.batch import SequenceChunk
from engine.device.base import Device
from engine.formats.files import describe, read_config
from engine.kv_cache.page_table import OutOfPages
from engine.loader import load_model
from engine.runner import SharedArena
from engine.shard import Shard
from engine.tensor_parallel.orders import LoadModel
from engine.tensor_parallel.runner import Others, Parallel, TensorParallelRunner
from springtide.errors import ConfigError
from springtide.modelinfo import KVDtype
from tests.engine.sequences import Harness
from tests.engine.test_engine_runner import Recorder
from tests.support.models import demo_gguf, make_tiny_llama, make_tiny_model
from tests.support.reference import Reference, random_prompt
from tests.support.waiting import wait_until

SLOTS = 60
WAIT_S = 60.0


@contextmanager
def shared_out(path: Path, size: int = 2, dtype: KVDtype = "float32", **options: Any) -> Iterator[Harness]:
    """A harness around `size` ranks that share an arena, of which none is lost."""
    with Lossy(path, size, dtype, **options) as group:
        yield group.harness
        assert not group.lost.is_set()


class Lossy:
    """As `shared_out`, where one may be lost. The arena begins somewhere in its file, and its token is one end of a socket pair."""

    OFFSET = 4096

    def __init__(
        self, path: Path, size: int = 2, dtype: KVDtype = "float32", devices: Sequence[Device] | None = None, **options: Any
    ) -> None:
        info = describe(str(path))
        spec = info.kv_spec(dtype, 16)
        self.lost = threading.Event()
        self.memory_fd = os.memfd_create("arena")
        self.witness, self.token = socket.socketpair()
        os.ftruncate(self.memory_fd, self.OFFSET + SLOTS * spec.bytes_per_slot)
        memory = np.frombuffer(mmap.mmap(self.memory_fd, 0), np.uint8)[self.OFFSET :]
        self.arena = SharedArena(memory, self.memory_fd, self.OFFSET, self.token.fileno())
        parallel = Parallel(devices or [None] * size, 1, 60.0, path.parent / "meeting", self.lost.set)
        self.runner = TensorParallelRunner.start(info, dtype, spec, self.arena, SLOTS, parallel, **options)
        self.harness = Harness.around(self.runner, memory)

    def __enter__(self) -> Lossy:
        return self

    def __exit__(self, *error: object) -> None:
        self.runner.close()
        os.close(self.memory_fd)
        self.witness.close()
        self.token.close()


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 161, "vocab_size": 321}),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}),
        ("Gemma", {"head_dim": 32}),
    ],
)
def test_two_ranks_equal_transformers(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    path = make_tiny_model(tmp_path / "tiny", family, **config)
    prompt = random_prompt(1, 70, 10, 250)
    wanted = Reference.from_directory(path).greedy(prompt, 8)
    with shared_out(path) as harness:
        for chunk in (16, 33, 70):
            harness.foul()
            assert harness.greedy(prompt, 8, chunk=chunk) == wanted


def test_four_ranks_write_the_slabs_that_one_writes(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny", num_attention_heads=8, num_key_value_heads=4)
    info = describe(str(path))
    alone = Harness(load_model(info, "float32"), info.kv_spec("float32", 16), SLOTS)
    batch = [SequenceChunk(random_prompt(2, 40, 10, 250), 0, [5, 2, 9]), SequenceChunk([7], 0, [3])]
    with shared_out(path, size=4) as harness:
        logits = harness.runner.forward(batch)
        assert (logits - alone.runner.forward(batch)).abs().max() < 1e-4
        ours, theirs = (arena.view(np.float32).reshape(SLOTS, -1)[[5, 2, 9, 3]] for arena in (harness.arena, alone.arena))
        assert np.allclose(ours, theirs, atol=1e-4)


def test_ranks_take_a_stage_s_layers_and_its_hidden_states(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    info = describe(str(path))
    prompt = random_prompt(3, 30, 10, 250)
    batch = [SequenceChunk(prompt, 0, [4, 1])]
    whole = Harness(load_model(info, "float32"), info.kv_spec("float32", 16), SLOTS)
    wanted = whole.runner.forward(batch)
    hidden = Harness(load_model(info, "float32", (0, 1)), info.kv_spec("float32", 16), SLOTS).runner.forward_layers(batch, None)
    with shared_out(path, layers=(1, 3)) as harness:
        logits = harness.runner.logits(batch, harness.runner.forward_layers(batch, hidden))
        assert (logits - wanted).abs().max() < 1e-4


class Stop(Exception): ...


def test_hooks_stop_all_ranks_and_the_next_pass_goes_on(tmp_path: Path) -> None:
    class Stopping(Recorder):
        def before(self, layer: int) -> None:
            super().before(layer)
            if layer == 1:
                raise Stop

    path = make_tiny_llama(tmp_path / "tiny")
    prompt = random_prompt(4, 20, 10, 250)
    with shared_out(path) as harness:
        with pytest.raises(Stop):
            harness.runner.forward([SequenceChunk(prompt, 0, [0, 1])], Stopping())
        with pytest.raises(ValueError, match="slot 60 is outside"):
            harness.runner.forward([SequenceChunk(prompt, 0, [0, 60])])
        recorder = Recorder()
        harness.runner.forward([SequenceChunk(prompt, 0, [0, 1])], recorder)
        assert recorder.calls == [(when, layer) for layer in range(3) for when in ("before", "after")]
        harness.foul()
        assert harness.greedy(prompt, 5) == Reference.from_directory(path).greedy(prompt, 5)


class Failing(Recorder):
    """After the layer `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def after(self, layer: int) -> None:
        if layer == self.last:
            raise Stop


def test_a_hook_that_fails_after_a_layer_stops_all_ranks(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    prompt = random_prompt(5, 20, 10, 250)
    with shared_out(path) as harness:
        for last in (0, 1, 2):
            with pytest.raises(Stop):
                harness.runner.forward([SequenceChunk(prompt, 0, [0, 1])], Failing(last))
        harness.foul()
        assert harness.greedy(prompt, 5) == Reference.from_directory(path).greedy(prompt, 5)


def test_ranks_have_their_heads_of_each_slab_on_devices_of_their_own(tmp_path: Path) -> None:
    """As `engine.device`, on the CPU: of pages that one rank has fewer of than the other."""
    path = make_tiny_llama(tmp_path / "tiny", num_attention_heads=8, num_key_value_heads=4)
    devices = [Device(torch.device("cpu"), most_pages=pages) for pages in (12, 9)]
    info = describe(str(path))
    alone = Harness(load_model(info, "float32"), info.kv_spec("float32", 16), SLOTS)
    prompt = random_prompt(9, 90, 10, 250)
    with shared_out(path, devices=devices) as harness:
        harness.runner.warm_up()
        assert (harness.arena == 0xFF).all(), "what is prepared is written nowhere"
        slots = harness.slots(130)
        for begin, end in ((0, 50), (50, 90)):
            for one in (harness, alone):
                one.runner.forward([SequenceChunk(prompt[begin:end], begin, slots)], Recorder())
        ours, theirs = (arena.view(np.float32).reshape(SLOTS, -1)[slots[:6]] for arena in (harness.arena, alone.arena))
        assert np.allclose(ours, theirs, atol=1e-4)
        with pytest.raises(OutOfPages, match="needs 10 pages of the device's 9"):
            harness.runner.forward([SequenceChunk([5] * 150, 0, harness.slots(150))])
        wanted = Reference.from_directory(path).greedy(prompt, 20)
        assert harness.greedy(prompt, 20, start=80, slots=slots) == wanted
        harness.runner.forget(slots)
        assert not harness.runner.loads_ahead and harness.runner.load_ahead(slots) is None, "all ranks load in the pass"
        harness.foul()
        assert harness.greedy(prompt, 20, chunk=40) == wanted


def test_a_hook_stops_ranks_on_devices_too(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    prompt = random_prompt(5, 20, 10, 250)
    with shared_out(path, devices=[Device(torch.device("cpu"))] * 2) as harness:
        for last in (0, 1, 2):
            with pytest.raises(Stop):
                harness.runner.forward([SequenceChunk(prompt, 0, [0, 1])], Failing(last))
        assert harness.greedy(prompt, 5, slots=[0, 1]) == Reference.from_directory(path).greedy(prompt, 5)


def test_an_error_that_only_one_rank_has_is_the_end_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lossy(make_tiny_llama(tmp_path / "tiny")) as group:
        monkeypatch.setattr(group.runner.model, "run_layers", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            group.runner.forward([SequenceChunk([5] * 20, 0, [0, 1])])
        assert group.lost.is_set()


def test_the_loss_of_a_rank_is_told_and_passes_fail(tmp_path: Path) -> None:
    with Lossy(make_tiny_llama(tmp_path / "tiny")) as group:
        os.kill(group.runner.rank_pids[0], signal.SIGKILL)
        assert group.lost.wait(30)
        with pytest.raises(RuntimeError):
            group.runner.forward([SequenceChunk([5] * 20, 0, [0, 1])])


def test_the_loss_of_a_rank_is_told_before_all_have_met(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
import numpy as np
from engine.formats.files import describe
from engine.tensor_parallel.runner import Parallel, TensorParallelRunner
info = describe(sys.argv[1])
spec = info.kv_spec("float32", 16)
parallel = Parallel([None] * 2, 1, 600.0, Path(sys.argv[2]), lambda: os._exit(7))
TensorParallelRunner.start(info, "float32", spec, np.zeros(60 * spec.bytes_per_slot, np.uint8), 60, parallel)
"""
    model, meeting = make_tiny_llama(tmp_path / "tiny"), tmp_path / "meeting"
    with subprocess.Popen([sys.executable, "-c", script, str(model), str(meeting)]) as first:
        wait_until(lambda: meeting.exists() or first.poll() is not None, "it to come to the meeting", WAIT_S, poll_s=0.001)
        (rank,) = psutil.Process(first.pid).children()
        rank.kill()
        assert first.wait(WAIT_S) == 7, "it waits for the other as long as for a pass"


def test_ranks_let_go_of_an_arena_that_is_left_and_take_another(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny")
    prompt = random_prompt(6, 20, 10, 250)
    with Lossy(path) as group:
        wanted = group.harness.greedy(prompt, 5)
        group.runner.leave_arena()
        group.token.close()
        group.witness.settimeout(30)
        assert group.witness.recv(1) == b"", "all ends of the token are closed"
        group.witness, group.token = socket.socketpair()
        group.runner.set_arena(replace(group.arena, token_fd=group.token.fileno()), SLOTS)
        group.harness.foul()
        assert group.harness.greedy(prompt, 5) == wanted and not group.lost.is_set()


@pytest.mark.skipif(not backends.native_can_run(read_config(demo_gguf())), reason="this machine has no AVX2")
def test_ranks_compute_with_the_kernels_in_bfloat16(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "tiny", head_dim=32, num_attention_heads=8, num_key_value_heads=4, intermediate_size=166)
    info = describe(str(path))
    alone = Harness(load_model(info, "bfloat16"), info.kv_spec("bfloat16", 16), SLOTS)
    batch = [SequenceChunk(random_prompt(2, 40, 10, 250), 0, [5, 2, 9]), SequenceChunk([7], 0, [3])]
    with shared_out(path, dtype="bfloat16") as harness:
        assert harness.runner.model.backend.name == "native"
        logits, wanted = harness.runner.forward(batch), alone.runner.forward(batch)
        assert (logits - wanted).norm() < 0.05 * wanted.norm()
        ours, theirs = (torch.from_numpy(arena).view(torch.bfloat16).view(SLOTS, -1) for arena in (harness.arena, alone.arena))
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert (ours.nan_to_num() - theirs.nan_to_num()).float().norm() < 0.05 * theirs.nan_to_num().float().norm()


def test_a_degree_that_does_not_divide_the_kv_heads_is_refused(tmp_path: Path) -> None:
    info = describe(str(make_tiny_llama(tmp_path / "tiny")))
    spec = info.kv_spec("float32", 16)
    parallel = Parallel([None] * 3, 1, 60.0, tmp_path / "meeting", lambda: None)
    with pytest.raises(ConfigError, match="tensor_parallel 3: the model's 2 KV heads must be a multiple of it"):
        TensorParallelRunner.start(info, "float32", spec, np.zeros(spec.bytes_per_slot, np.uint8), 1, parallel)


@pytest.mark.parametrize("total", [1, 7, 64, 321])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shards_cover_everything_once(total: int, size: int) -> None:
    parts = [range(total)[Shard(rank, size).of(total)] for rank in range(size)]
    assert [column for part in parts for column in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rank_ends_with_the_first_one_even_while_it_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = describe(str(make_tiny_llama(tmp_path / "tiny")))
    meeting = tmp_path / "meeting"
    with Others(lambda: None) as others:
        others.start(LoadModel(info, "float32", None, "plain", info.kv_spec("float32", 16), 1, 2, str(meeting), 600.0, 1, None))
        wait_until(lambda: meeting.exists() and meeting.stat().st_size, "it to come to the meeting", WAIT_S)
    assert not caplog.records, "it was not killed"


def test_a_rank_that_hangs_ends_with_the_first_one(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from engine.formats.files import describe
from engine.tensor_parallel.orders import LoadModel
from engine.tensor_parallel.runner import Others
info = describe(sys.argv[1])
others = Others(lambda: None)
others.start(LoadModel(info, "float32", None, "auto", info.kv_spec("float32", 16), 1, 2, sys.argv[2], 60.0, 1, None))
print(others.pids[0], flush=True)
sys.stdin.read()
"""
    model = make_tiny_llama(tmp_path / "tiny")
    command = [sys.executable, "-c", script, str(model), str(tmp_path / "meeting")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        rank = psutil.Process(int(first.stdout.readline()))
        wait_until(lambda: _ignores(rank.pid, signal.SIGTERM), "the rank to begin", WAIT_S)
        os.kill(rank.pid, signal.SIGSTOP)
        first.kill()
        psutil.wait_procs([rank], WAIT_S)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE


def _ignores(pid: int, number: int) -> bool:
    (ignored,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(ignored.split()[1], 16) & (1 << (number - 1)))
