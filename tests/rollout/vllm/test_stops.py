"""An engine that is stopped (SIGSTOP) at any stage is ended and made anew; what was asked comes all the same."""

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from cluster.processes_of import is_running, wait_until_gone
from rollout.engines import agreement, generate, random_prompts, save_family, shake

from verl.component import BuildContext
from verl.rollout.base import GenerationRequest
from verl.rollout.engine_process.messages import EngineSetup
from verl.rollout.engine_process.process import EngineDied, EngineFiles, EngineProcess
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine import SERVER
from verl.utils.orphan_cleanup import members

pytestmark = pytest.mark.xdist_group("vllm")

LIMIT_S = 6.0  # without progress; the longest piece of work of these engines takes about one, on a busy machine two
SMALL = {"max_new_tokens": 8, "kv_cache_gib": 0.05, "max_num_seqs": 16, "num_threads": 1, "call_timeout_s": LIMIT_S}


def struck_at_start(number: signal.Signals, call_timeout_s: float) -> tuple[EngineProcess, int, EngineDied]:
    """An engine's process that gets a signal as soon as it is there; its id, and what is said of it."""
    setup = EngineSetup("vLLM", SERVER, "no setting: it is not asked for", {}, torch.float32)
    process = EngineProcess(setup, EngineFiles(), None, call_timeout_s)
    pids: list[int] = []

    def strike() -> None:
        while process.process_id is None:
            time.sleep(0.001)
        pids.append(process.process_id)
        os.kill(pids[0], number)

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(EngineDied) as caught:
        process.start()
    striker.join()
    return process, pids[0], caught.value


def test_a_killed_engine_is_noticed_where_another_process_holds_its_socket(monkeypatch):
    """As a worker does that it has forked."""
    kept, pair = [], socket.socketpair

    def kept_pair(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair(*kind)
        kept.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", kept_pair)
    process, _, death = struck_at_start(signal.SIGKILL, call_timeout_s=600.0)
    assert "asked to start, ended with signal SIGKILL" in death.reason
    process.files.remove()


def test_an_engine_that_is_stopped_while_it_starts_is_named_with_its_stage_and_ended():
    process, pid, death = struck_at_start(signal.SIGSTOP, call_timeout_s=1.0)
    last = str(death).splitlines()[-1]
    assert last.startswith(f"The vLLM engine (process {pid}), asked to start, made no progress for 1 s (rollout.call_")
    assert last.endswith("it is stopped (SIGSTOP or SIGTSTP). It was ended.")
    assert not is_running(pid)
    process.files.remove()
    assert not process.files.directory.exists()
    assert not process.files.temporary.exists()


def stop_at(engine, monkeypatch, asked: str, *, before: bool = False, whom=lambda pid: [pid], number=signal.SIGSTOP):
    """Send a signal when the engine is next asked for something, or just before; gives the ids of those that got it."""
    struck: list[int] = []
    process, send = engine.process, engine.process.send

    def strike() -> None:
        if not struck:
            struck.extend(whom(process.process_id))
            for pid in struck:
                os.kill(pid, number)

    def sending(method, *args):
        if method == asked and before:
            strike()
        send(method, *args)
        if method == asked:
            strike()

    monkeypatch.setattr(process, "send", sending)
    return struck


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def pair(source, tmp_path_factory):
    """vLLM and our own loop on the same weights."""
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    context = BuildContext(run_dir=tmp_path_factory.mktemp("run"))
    vllm = VLLMRollout(**SMALL).attach(model, tokenizer, 5, None, context)
    vllm.weight_sync.chunk_bytes = 80_000  # some ten chunks: the trainer waits for the engine in the middle of a load
    yield vllm, HFRollout(max_new_tokens=8).attach(model, tokenizer, 5), model
    vllm.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [False, True], ids=["after it is asked", "before"])
@pytest.mark.parametrize("stage", ["advance_turns", "load", "prove"])
def test_a_stop_at_any_stage_is_outlived(stage, before, pair, monkeypatch, caplog):
    vllm, ours, model = pair
    shake(model, seed=len(stage) + before)
    vllm.weights.state.is_current = stage == "advance_turns"
    if stage == "advance_turns":
        vllm.sync()
    stopped = stop_at(vllm, monkeypatch, stage, before=before)
    with caplog.at_level(logging.WARNING):
        found = generate(vllm, random_prompts(), GenerationRequest(3, 4))
    assert agreement(found, generate(ours, random_prompts(), GenerationRequest(3, 4)))[0] >= 0.99
    assert "made no progress for 6 s (rollout.call_timeout_s)" in caplog.text
    assert "it is stopped (SIGSTOP or SIGTSTP)" in caplog.text
    assert stopped != [vllm.process_id]
    assert not is_running(stopped[0])
    assert vllm.weight_sync.stream.chunk_bytes <= 80_000  # larger tensors came by their rows


@pytest.mark.exhaustive
def test_work_that_takes_longer_than_the_limit_and_goes_on_is_waited_for(source, monkeypatch):
    """Pulses of work with stops between them, each shorter than the limit, all together three times as long."""
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    vllm = VLLMRollout(**SMALL | {"max_new_tokens": 64}).attach(model, tokenizer, 5)
    try:
        vllm.sync()
        pid, is_done, pulses = vllm.process_id, threading.Event(), []

        def pulse() -> None:
            while not is_done.is_set() and len(pulses) < 5:
                os.kill(pid, signal.SIGSTOP)
                pulses.append(pid)
                is_done.wait(2.0)
                os.kill(pid, signal.SIGCONT)
                is_done.wait(0.1)

        pulsing = threading.Thread(target=pulse)
        pulsing.start()
        try:
            generate(vllm, random_prompts(64), GenerationRequest(0, 8))
        finally:
            is_done.set()
            pulsing.join()
        assert vllm.process_id == pid
        assert 2.0 * len(pulses) > LIMIT_S
    finally:
        vllm.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("stage", ["advance_turns", "load", "prove"])
@pytest.mark.parametrize("workers", ["tensor", "pipeline"])
def test_a_worker_of_an_engine_of_two_that_is_stopped_or_killed_is_outlived(
    workers, stage, number, source, tmp_path, monkeypatch, caplog
):
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    limit = {"call_timeout_s": 30.0}  # its second process imports vLLM while the first one waits
    options = VLLMRollout(**SMALL | limit, **{f"{workers}_parallel_size": 2})
    vllm = options.attach(model, tokenizer, 0, None, BuildContext(run_dir=tmp_path))
    ours = HFRollout(max_new_tokens=8).attach(model, tokenizer, 0)

    def last_worker(pid: int) -> list[int]:
        return [max(one for one in members(pid) if b"Worker" in Path(f"/proc/{one}/cmdline").read_bytes())]

    try:
        vllm.sync()
        group = members(vllm.process_id)
        vllm.weights.state.is_current = stage == "advance_turns"
        stop_at(vllm, monkeypatch, stage, before=True, whom=last_worker, number=number)
        with caplog.at_level(logging.WARNING):
            same, _ = agreement(*(generate(one, random_prompts(), GenerationRequest(1, 4)) for one in (vllm, ours)))
        assert same >= 0.95
        if number == signal.SIGSTOP:
            assert "is stopped (SIGSTOP or SIGTSTP)" in caplog.text
        else:  # the engine ends with its worker, or logs its death and waits
            assert "signal SIGKILL" in caplog.text or "died unexpectedly" in caplog.text
        assert wait_until_gone(group) == []
    finally:
        vllm.close()
    assert [name for name in os.listdir("/dev/shm") if vllm.process.files.name in name] == []
