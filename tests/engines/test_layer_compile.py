"""Compiled layers compute what layers do, for every micro-batch by the same programs, and decode as they are."""

import functools
import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from random_models import save_random_model
from roles import gradients, start_actor, with_experience
from trial_rows import TrialRow, as_batch

from verl.component import BuildContext
from verl.engines.layer_compile import AUTO_WIDTH, compile_layers, is_worth_compiling, programs_of
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import Parallelism, ShardedParallelism
from verl.engines.sharding import FSDP
from verl.errors import ConfigError
from verl.model_paths import packed_attention
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.rollout.base import GenerationRequest
from verl.workers import base, first_batch_check

EXACT = TinyModel(hidden_size=32, intermediate_size=64, num_layers=3, dtype="float64")


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """How many programs were compiled; nothing stays compiled for the next test."""
    monkeypatch.setattr(packed_attention, "_registered", packed_attention._registered)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch):
    """Programs are found, and run by torch as they are."""
    monkeypatch.setattr(base, "compile_layers", functools.partial(compile_layers, backend="eager"))


def rows(longest, seed=0):
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, 60, (n,), generator=draw) for n in (20, 11, 7)]
    lengths = [(longest, longest // 2, 3), (longest - 1, 5, 2), (4, longest // 3, longest)]
    made = zip(prompts, lengths, strict=True)
    return as_batch([TrialRow(p, torch.randint(4, 60, (n,), generator=draw)) for p, of in made for n in of])


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "packing": "off"}], ids=str)
def test_an_update_is_that_of_layers_that_are_not_compiled(options, quick, programs):
    plain, compiled = (
        start_actor(TinyModel(**{**vars(EXACT), "compile": is_compiled}), micro_batch_tokens=60, **options)
        for is_compiled in (False, True)
    )
    for longest in (17, 30):
        batch = with_experience(rows(longest), plain)
        scores = [actor.compute_log_probs(batch)["old_log_probs"] for actor in (plain, compiled)]
        torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-11)
        metrics = [actor.update(batch) for actor in (plain, compiled)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-8)
        found = [gradients(actor.engine.model) for actor in (plain, compiled)]
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-10)
    assert programs()


@pytest.mark.exhaustive
def test_other_lengths_and_other_packings_compile_nothing_and_neither_does_decoding(quick, programs, prompts, caplog):
    plain, actor = (
        start_actor(TinyModel(**{**vars(EXACT), "compile": is_compiled}), micro_batch_tokens=60)
        for is_compiled in (False, True)
    )
    batch = with_experience(rows(17), actor)
    assert actor.engine.paths(batch).scoring == "packed"  # its layers count as those of its family
    wanted = plain.compute_log_probs(batch)["old_log_probs"]
    torch.testing.assert_close(batch["old_log_probs"], wanted, rtol=0, atol=1e-11)
    assert actor.update(batch) == pytest.approx(plain.update(batch), rel=1e-8)
    before = programs()
    assert 0 < before <= 12  # of one layer: with gradients and without
    with caplog.at_level(logging.WARNING):
        for longest in (9, 23, 31, 40):
            batch = with_experience(rows(longest, seed=longest), actor)
            actor.update(batch)
        actor.generate(prompts(), GenerationRequest(0, 2))
    assert programs() == before
    assert not [record for record in caplog.records if "recompile" in record.getMessage()]


def test_what_was_not_tried_compiled_is_refused(tmp_path):
    model = Pretrained(path=str(save_random_model(tmp_path, "qwen3_moe", torch.float32)), compile=True)
    with pytest.raises(ConfigError, match="has experts"):
        start_actor(model)
    parallel = object.__new__(ShardedParallelism)
    parallel.degrees = ParallelDegrees(tp=2, dp_shard=4)
    with pytest.raises(ConfigError, match=r"sharding.tp is 2"):
        compile_layers(SimpleNamespace(), parallel)


@pytest.mark.exhaustive
def test_layers_under_fsdp_are_compiled_alike(tmp_path, quick, programs):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        path = save_random_model(tmp_path / "model", "qwen3", torch.float64)
        found = []
        for is_compiled in (False, True):
            model = Pretrained(path=str(path), dtype="float64", compile=is_compiled)
            parallel = FSDP().build(BuildContext(rank=0, world_size=1))
            whole = base.load_unsharded(model, "causal_lm", "cpu", parallel)
            if is_compiled:
                programs_of(whole).are_used = True
            parallel.shard_model(whole, None)
            ids = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(0))
            whole(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
            found.append({name: p.grad.full_tensor() for name, p in whole.named_parameters()})
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-6, atol=1e-6)
        assert programs()
    finally:
        dist.destroy_process_group()


# actor.model.compile=auto


TESTS = str(Path(__file__).resolve().parents[1])


def optional(monkeypatch, backend="eager"):
    """As on a GPU: layers are compiled without being asked for."""
    monkeypatch.setattr(base, "is_worth_compiling", lambda *_: True)
    monkeypatch.setattr(base, "compile_layers", functools.partial(compile_layers, backend=backend))
    monkeypatch.setattr(first_batch_check, "TRIAL_TOKENS", 100)


def test_on_a_cpu_nothing_is_compiled_without_being_asked_for():
    wide = TinyModel(hidden_size=AUTO_WIDTH, num_layers=1)
    model = wide.load_causal_lm("cpu")
    assert is_worth_compiling(model, Parallelism(), "cuda:0")
    assert not is_worth_compiling(model, Parallelism(), "cpu")
    assert not is_worth_compiling(model, SimpleNamespace(world_size=2), "cuda:0")
    assert not is_worth_compiling(EXACT.load_causal_lm("cpu"), Parallelism(), "cuda:0")
    assert programs_of(start_actor(wide).engine.model) is None


@pytest.mark.slow
def test_a_trial_that_agrees_computes_packed_lines_by_programs_and_rows_alone_as_they_are(monkeypatch, programs):
    plain = start_actor(EXACT)
    optional(monkeypatch)
    actor = start_actor(EXACT)
    batch = with_experience(rows(17), plain)
    state = torch.get_rng_state()
    torch.testing.assert_close(
        actor.compute_log_probs(batch)["old_log_probs"], batch["old_log_probs"], rtol=0, atol=1e-11
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert programs_of(actor.engine.model).are_used
    assert actor.update(batch) == pytest.approx(plain.update(batch), rel=1e-8)
    before = programs()
    assert 0 < before <= 12
    actor.plain_log_probs(batch)
    assert programs() == before


def wrong(graph, inputs):
    return lambda *given: [x * 1.5 if isinstance(x, torch.Tensor) else x for x in graph(*given)]


def failing(graph, inputs):
    raise OSError("no compiler")


def without_gradients(graph, inputs):
    is_float = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    return lambda *given: [x + (x - x.detach()).abs().sqrt() if is_float(x) else x for x in graph(*given)]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("backend", "reason"), [(failing, "no compiler"), (wrong, "results differ by"), (without_gradients, "is nan")]
)
def test_a_trial_that_fails_leaves_the_layers_as_they_are_and_says_so_once(backend, reason, monkeypatch, caplog):
    plain = start_actor(EXACT)
    optional(monkeypatch, backend)
    actor = start_actor(EXACT)
    batch = with_experience(rows(17), plain)
    for _ in range(2):
        found = actor.compute_log_probs(batch)["old_log_probs"]
        assert torch.equal(found, batch["old_log_probs"])
    assert actor.update(batch) == plain.update(batch)
    told = [text for text in caplog.messages if "are not compiled" in text]
    assert len(told) == 1
    assert reason in told[0]


def gradients_by_programs(lengths):
    """Digest of the gradients of one batch, after log-probs of batches of these lengths."""
    actor = start_actor(TinyModel(compile=True, hidden_size=64, intermediate_size=128), micro_batch_tokens=400)
    for longest in lengths:
        actor.compute_log_probs(rows(longest))
    actor.update(with_experience(rows(19), actor))
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in gradients(actor.engine.model).values())).hexdigest()


@pytest.mark.exhaustive
def test_processes_come_to_the_same_bits_whatever_they_compiled_first_and_whatever_is_on_disk(tmp_path):
    found = []
    for number, lengths in enumerate([(17,), (40, 9), (17,)]):
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number % 2)), "PYTHONPATH": TESTS}
        script = f"from engines.test_layer_compile import gradients_by_programs as g; print(g({lengths}))"
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout.split()[-1])
    assert len(set(found)) == 1
