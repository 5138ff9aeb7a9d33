"""Calls into torch.cuda and torch.distributed, recorded by stand-ins: which, with what, and in which order."""

import contextlib
import functools
import mmap
import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from roles import experience, start_actor
from torch.distributed.distributed_c10d import Backend, BackendConfig

from verl.checkpoint.save import host_buffer
from verl.checkpoint.save.host_buffer import HostBuffer, HostBufferPool
from verl.checkpoint.save.snapshot import Snapshot, pin_memory
from verl.component import BuildContext
from verl.engines import engine as engine_module
from verl.engines.parallel_dims import DataParallelism
from verl.engines.sharding import DDP, FSDP, HSDP, Parallel
from verl.model_paths import decode
from verl.models.tiny import TinyModel
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.hf import HFRollout
from verl.rollout.process_engine import ProcessEngine, grouped
from verl.rollout.proof.fingerprints import ProbeVectors
from verl.rollout.proof.verifier import VerifyRequest
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import environment
from verl.rollout.weight_sync.engine_weights import EngineWeights
from verl.trainer.plan.workload import free_memory
from verl.trainer.setup import prepare_context
from verl.utils import memory, seeding
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker

MODEL = TinyModel(hidden_size=32, intermediate_size=64)


@pytest.fixture
def calls(monkeypatch):
    """What was called, in order; of torch.cuda what would open a context."""
    found: list[tuple] = []

    @contextlib.contextmanager
    def device(which):
        found.append(("device", str(which)))
        yield
        found.append(("device", "left"))

    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: found.append(("register", size, flags)) or 0,
        cudaHostUnregister=lambda address: found.append(("unregister",)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda which: found.append(("set_device", str(which))))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(("empty_cache",)))
    return found


def test_host_memory_is_pinned_for_every_context_on_the_process_own_device_and_released_with_the_buffer(calls):
    buffer = HostBuffer()
    region = buffer.fit(4 * mmap.PAGESIZE)
    buffer.before_release = pin_memory(torch.frombuffer(region, dtype=torch.uint8), torch.device("cuda:3"))
    assert calls == [("device", "cuda:3"), ("register", buffer.num_bytes, 1), ("device", "left")]
    calls.clear()
    buffer.release()
    assert calls == [("device", "cuda:3"), ("unregister",), ("device", "left")]
    buffer.release()
    assert len(calls) == 3


def test_a_process_takes_its_device_before_it_joins_a_group_that_takes_tensors_of_both_memories(calls, monkeypatch):
    joined = {}
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: calls.append(("join",)) or joined.update(options))
    DataParallelism(BuildContext(device="cuda:1", rank=1, world_size=2), 60.0)
    assert calls == [("set_device", "cuda:1"), ("join",)]
    taken = BackendConfig(Backend(joined["backend"])).get_device_backend_map()
    assert taken["cuda"] == "nccl"
    assert taken["cpu"] == "gloo"  # offloaded gradients lie in main memory


@pytest.mark.parametrize(("backend", "takes"), [("cuda:fake", False), ("cpu:gloo,cuda:fake", True)])
def test_a_group_for_devices_alone_refuses_the_gradients_of_an_offloaded_model(backend, takes, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        parallel = DataParallelism(BuildContext(), 60.0)
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        refused = contextlib.nullcontext() if takes else pytest.raises(RuntimeError, match="device type cpu")
        with refused:
            parallel.sum_over([parameter], None)
    finally:
        dist.destroy_process_group()


def test_an_engine_is_woken_once_after_it_slept_and_a_new_one_not(calls):
    process = SimpleNamespace(
        process_id=3, call=lambda *told: calls.append(told), send=lambda *_: None, is_alive=lambda: True
    )
    verifier = SimpleNamespace(question=lambda **_: VerifyRequest(ProbeVectors(), ()))
    engine = EngineWeights(process, EngineInfo(64, 1), None, verifier, None, 1)

    def sync() -> list[tuple]:
        calls.clear()
        engine.begin_verify(engine.begin(lambda: None)[0], {})
        return list(calls)

    assert sync() == []
    engine.sleep()
    engine.sleep()
    assert calls == [("sleep",)]
    assert engine.needs_sync
    assert sync() == [("wake", "weights"), ("wake", "kv_cache")]
    assert sync() == []
    engine.sleep()
    process.process_id = 4
    assert sync() == []


def test_before_an_engine_is_started_again_torch_gives_back_what_it_kept_beside_the_last_one(calls):
    info = EngineInfo(64, 1)
    engine = object.__new__(ProcessEngine)
    engine.options, engine.parallel_info = VLLMRollout(), SimpleNamespace(device=torch.device("cuda:0"))  # type: ignore
    engine.process = SimpleNamespace(  # type: ignore[assignment]
        is_alive=lambda: False, kill=lambda: None, start=lambda timeout_s: calls.append(("start",)) or info
    )
    memory.keep_cached(True)
    try:
        engine._start()
    finally:
        memory.keep_cached(False)
    assert calls == [("empty_cache",), ("start",)]


@pytest.mark.parametrize(
    ("stops", "unproven", "asked"), [(True, 0, [1, 0, 0, 1]), (False, 0, [1] * 4), (True, 2, [1] * 4)]
)
def test_the_function_of_an_engine_is_probed_once_in_a_process_where_the_gap_of_responses_ends_a_run(
    stops, unproven, asked
):
    sent = []
    process = SimpleNamespace(
        process_id=3, is_alive=lambda: True, send=lambda _, question: sent.append(question), answer=lambda: None
    )

    def verify(reply):
        gap = {"sync/probe_gap_nats": 0.0} if sent[-1].rows else {}
        return {"sync/unproven_tensors": float(unproven)} | gap

    verifier = SimpleNamespace(
        question=lambda **_: VerifyRequest(ProbeVectors(), ((1, 2),)),
        without_probe=lambda question: replace(question, rows=()),
        adopt=lambda *_: None,
        verify=verify,
    )
    engine = EngineWeights(process, EngineInfo(64, 1), None, verifier, None, 1, stops)
    for number in range(4):
        process.process_id = 3 + (number == 3)  # the last one meets a new process
        engine.begin_verify(engine.begin(lambda: False)[0], {})
        engine.end_verify([], 0.0)
        engine.prove_function()
    assert [len(question.rows) for question in sent] == asked


def test_a_sync_begins_without_gradients_and_without_cached_memory(calls, monkeypatch, prompts):
    actor = start_actor(MODEL)
    rows = experience(actor, prompts(), num_samples=2)
    monkeypatch.setattr(engine_module, "release_cached", lambda device: calls.append(("empty_cache",)))
    generator = SimpleNamespace(offload=lambda: calls.append(("offload",)), sync=actor.generator.sync)
    synced = generator.sync
    generator.sync = lambda: calls.append(("sync", all(p.grad is None for p in actor.model.parameters()))) or synced()
    actor.generator = generator
    actor.update(rows)
    actor.sync()
    assert calls == [("offload",), ("empty_cache",), ("sync", True)]


def test_an_update_on_a_device_leaves_no_gradients(prompts):
    actor = start_actor(MODEL)
    rows = experience(actor, prompts(), num_samples=2)
    actor.update(rows)
    assert any(p.grad is not None for p in actor.model.parameters())
    actor.engine.micro_batches = lambda *asked: (micro for micro in made)
    made = list(type(actor.engine).micro_batches(actor.engine, rows))
    actor.engine.device = torch.device("meta")  # another one than the CPU
    actor.update(rows)
    assert all(p.grad is None for p in actor.model.parameters())


def test_a_driver_without_roles_opens_no_context_on_any_gpu(calls, monkeypatch, tmp_path):
    def refuse(name):
        def called(*_, **__):
            raise AssertionError(f"torch.cuda.{name} opens a context")

        return called

    opening = ("mem_get_info", "current_device", "get_rng_state", "get_rng_state_all", "set_rng_state", "synchronize")
    for name in opening:
        monkeypatch.setattr(torch.cuda, name, refuse(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    settings = SimpleNamespace(
        device="auto", seed=1, project_name="p", experiment_name="e", cpu_matmul="auto", machine_faults=lambda: ()
    )
    context = prepare_context(BuildContext(run_dir=tmp_path), settings)
    assert context.device == "cuda:0"
    tensors, plain = seeding.rng_state()
    assert set(tensors) == {"torch"}
    seeding.set_rng_state(tensors | {"cuda_0": torch.zeros(16, dtype=torch.uint8)}, plain)
    assert free_memory("cuda:0", 8) is None  # no nvidia-smi here
    assert calls == []


def test_memory_of_a_gpu_is_asked_for_by_the_name_that_this_process_knows_it_by(monkeypatch):
    asked = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    told = SimpleNamespace(stdout="81559, 80000\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda command, **options: asked.append(command) or told)
    assert memory.gpu_memory_from_outside(1) == memory.DeviceMemory(81559 << 20, 80000 << 20)
    assert asked[0][:2] == ["nvidia-smi", "--id=GPU-5"]


def test_a_worker_keeps_the_generator_of_its_own_gpu_and_goes_on_from_it_on_another_one(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(4, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: given.append(state.tolist()))
    tensors, plain = seeding.rng_state()
    assert set(tensors) == {"torch", "cuda_3"}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    seeding.set_rng_state(tensors, plain)
    assert given == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("expandable_segments:True,max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"),
        ("max_split_size_mb:512", None),
        ("", None),
    ],
)
def test_memory_for_another_process_lies_outside_of_expandable_segments(monkeypatch, before, within):
    said = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: before, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    with memory.shareable_allocations():
        assert said == ([within] if within else [])
    assert said == ([within, before] if within else [])  # nothing of the user's settings is lost


def test_products_of_a_float32_engine_are_not_rounded():
    context = BuildContext(device="cuda:0")
    exact = environment(VLLMRollout(), context, 1, torch.float32, ["0"])
    assert exact["TRITON_F32_DEFAULT"] == "ieee"
    assert exact["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "TRITON_F32_DEFAULT" not in environment(VLLMRollout(), context, 1, torch.bfloat16, ["0"])
    assert exact["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_actor_offloads_its_engine_before_anything_else_computes(monkeypatch, tmp_path, model32):
    from trainer.runs import PPO_ALGORITHM, ppo_run

    found = []

    def record(kind, name):
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(*args, **kwargs):
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    record(ActorWorker, "generate")
    record(ActorWorker, "offload")
    record(ReferenceWorker, "compute_log_probs")
    record(CriticWorker, "compute_values")
    monkeypatch.setattr(HFRollout, "can_offload", True)
    run = ppo_run(model32, PPO_ALGORITHM, total_steps=1)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), 1)
    assert found[:2] == ["generate", "offload"]
    assert "compute_values" in found[2:]


def test_a_second_copy_of_all_tensors_is_made_only_where_main_memory_has_room_for_it(monkeypatch):
    free = 10 << 20
    monkeypatch.setattr(host_buffer, "free_main_memory", lambda: free)
    pool = HostBufferPool()
    first = pool.acquire(None, 8 << 20)  # there has to be one, however little is free
    assert first is not None
    first.fit(8 << 20)
    assert pool.acquire(None, 9 << 20) is None  # 1.2 times of that is not free
    second = pool.acquire(None, 8 << 20)
    assert second is not None
    second.fit(8 << 20)
    free = 0
    pool.give_back(second)
    assert pool.acquire(None, 8 << 20) is second  # its memory is there already
    pool.give_back(first)
    pool.give_back(second)
    pool.release()


@pytest.mark.parametrize("fault", [None, "not permitted when stream is capturing"])
def test_a_graph_is_made_after_torch_gave_back_what_it_keeps_and_a_failure_says_its_reason(
    fault, calls, monkeypatch, caplog
):
    class Graph:
        def capture_begin(self, **_):
            calls.append(("begin",))

        def capture_end(self):
            calls.append(("end",))
            if fault is not None:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self):
            calls.append(("replay",))

    def work():
        if calls[-1:] == [("begin",)] and fault is not None:
            raise RuntimeError(fault)
        calls.append(("work",))

    stream = SimpleNamespace(wait_stream=lambda other: None, device=torch.device("cuda:1"))
    for name, stand_in in {
        "graph_pool_handle": int, "CUDAGraph": Graph, "current_stream": {stream.device: stream}.__getitem__,
        "stream": contextlib.nullcontext, "Stream": {stream.device: stream}.__getitem__,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    decode.recording_stream.cache_clear()
    graphs = decode.StepGraphs(decode.GraphMaker(torch.device("cuda:1")))  # the current device is the first
    for _ in range(3):
        graphs.run("shape", work)
    found = [name for (name,) in calls]
    if fault is None:
        assert found == ["work", "empty_cache", "begin", "work", "end", "replay", "replay"]
    else:
        assert found == ["work", "empty_cache", "begin", "end", "work", "work"]
        assert f"of them: {fault}" in caplog.text


class OnDevice(torch.Tensor):
    """Numbers in main memory that say that they are on the second GPU, and write down what is asked of them."""

    calls: list

    @property
    def device(self):
        return torch.device("cuda:1")

    def contiguous(self):
        return self

    def record_stream(self, stream):
        self.calls.append(("used on", stream.name))


@pytest.fixture
def streams(calls, monkeypatch):
    """Streams and events by name; operations within the context of a stream are on that one."""
    current = ["compute"]

    class Stream:
        def __init__(self, device):
            assert device == torch.device("cuda:1")
            self.name = "side"

        def wait_event(self, event):
            calls.append((self.name, "waits for", event.name))

    class Event:
        def __init__(self):
            self.name = ""

        def record(self, stream):
            self.name = f"event of {stream.name}"
            calls.append((stream.name, "records", self.name))

        def synchronize(self):
            calls.append(("host", "waits for", self.name))

    @contextlib.contextmanager
    def stream(which):
        current.append(which.name)
        yield
        current.pop()

    copy = torch.Tensor.copy_

    def recorded_copy(target, source, non_blocking=False):
        calls.append((current[-1], "copies", non_blocking))
        with torch._C.DisableTorchFunctionSubclass():
            return copy(target, source)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(name=current[-1]))
    monkeypatch.setattr(torch.Tensor, "copy_", recorded_copy)
    return calls


def test_a_snapshot_copies_on_a_stream_of_its_own_after_what_was_asked_for_and_waits_for_the_copies(streams):
    parts = [torch.arange(8, dtype=torch.float32).as_subclass(OnDevice) for _ in range(2)]
    for part in parts:
        part.calls = streams
    host = torch.full((4,), 7.0)
    pieces = [(64, parts[0]), (96, parts[1]), (128, host), (144, b"text")]
    snapshot = Snapshot(pieces, 1)
    assert streams == [("compute", "records", "event of compute")]  # where the optimizer's step was asked for
    streams.clear()
    buffer = HostBuffer()
    memory = buffer.fit(148)
    thread = threading.Thread(target=snapshot.run, args=(buffer, 148))  # not the one that computes
    thread.start()
    thread.join()
    assert streams == [
        ("device", "cuda:1"), ("register", buffer.num_bytes, 1), ("device", "left"),
        ("side", "waits for", "event of compute"), ("device", "cuda:1"),
        ("used on", "side"), ("side", "copies", True), ("used on", "side"), ("side", "copies", True),
        ("side", "records", "event of side"), ("device", "left"),
        ("host", "waits for", "event of side"),
    ]  # fmt: skip
    found = torch.frombuffer(memory, dtype=torch.float32, offset=64, count=20)
    assert found.tolist() == [*range(8), *range(8), 7, 7, 7, 7]
    assert bytes(memory[144:148]) == b"text"
    buffer.release()


@pytest.mark.parametrize(
    "sharding",
    [
        DDP(timeout_s=77.0),
        FSDP(timeout_s=77.0),
        HSDP(replicas=2, timeout_s=77.0),
        Parallel(cp=2, dp_shard=4, timeout_s=77.0),
        Parallel(tp=2, dp_shard=4, timeout_s=77.0),
        Parallel(pp=2, dp_shard=2, tp=2, timeout_s=77.0),
        Parallel(ep=4, dp_shard=8, timeout_s=77.0),
        Parallel(dp_replicate=2, ep=2, dp_shard=4, timeout_s=77.0),
    ],
    ids=["ddp", "fsdp", "hsdp", "cp", "tp", "pp", "ep", "ep and replicas"],
)
def test_every_group_of_processes_has_the_time_limit_of_the_sharding(sharding, monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    limits = []
    made = dist.distributed_c10d._new_process_group_helper

    def recorded(*args, timeout, **options):
        limits.append(timeout)
        return made(*args, timeout=timeout, **options)

    init = dist.init_process_group
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", recorded)
    monkeypatch.setattr(
        dist, "init_process_group",
        lambda timeout, rank, world_size, **_: init(
            "fake", store=FakeStore(), rank=rank, world_size=world_size, timeout=timeout
        ),
    )  # fmt: skip
    parallel = sharding.build(BuildContext(rank=0, world_size=8))
    try:
        if hasattr(parallel, "_info"):
            grouped(parallel._info(), 4)  # of an engine
        assert set(limits) == {timedelta(seconds=77)}
        assert len(limits) > (0 if isinstance(sharding, DDP) else 3)
    finally:
        parallel.close()
