"""Which processes share an engine of several GPUs, and whose rows are whose: four ranks, one after another."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from refusals import refusal
from rollout.engines import random_prompts

from verl.cluster.local_worker_group import device_of_rank
from verl.cluster.placement import ROLES, DeviceMesh
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.models.parallel_info import ParallelInfo, parallel_info_of
from verl.models.tiny import TinyModel
from verl.ops.resharding.layout import Mesh
from verl.rollout import generation_group
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.generation_group import OneGenerates
from verl.rollout.process_engine import with_engine_group
from verl.rollout.proof.fingerprints import ProbeVectors
from verl.rollout.proof.verifier import VerifyRequest
from verl.rollout.vllm.engine_args import gpu_name
from verl.rollout.weight_sync import stream as shm_stream
from verl.rollout.weight_sync import sync as weight_sync
from verl.rollout.weight_sync.stream import Feed, StreamReader
from verl.rollout.weight_sync.sync import WeightSync

RANKS = 4


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """What groups of processes were asked for; there are no processes behind them."""
    found = []
    monkeypatch.setattr(
        dist, "new_subgroups_by_enumeration", lambda ranks, timeout: found.append(ranks) or (f"group {len(found)}", [])
    )
    return found


def divided_of(rank, num_siblings=1, device="cuda", ranks=RANKS, per_machine=RANKS):
    """A rank of an FSDP model, or of one with tensor-parallel siblings."""
    mesh = Mesh((("replicate", 1), ("shard", ranks // num_siblings), ("tensor", num_siblings)))
    where = torch.device(f"{device}:{rank % per_machine}" if device == "cuda" else device)
    first = rank // num_siblings * num_siblings
    siblings = tuple(range(first, first + num_siblings))
    return ParallelInfo(
        device=where,
        mesh=mesh,
        rank=rank,
        siblings=siblings,
        sibling_group=None,
        layout_of=lambda x: None,
        local=lambda x: x,
    )


def test_an_engine_of_two_gpus_is_shared_by_two_ranks_and_engines_never_overlap(monkeypatch, groups):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shared = [with_engine_group(divided_of(rank), 2) for rank in range(RANKS)]
    assert [own.siblings for own in shared] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert groups == [[[0, 1], [2, 3]]] * RANKS  # the same question in every process, in one order
    names = [gpu_name(str(own.device)) for own in shared]
    of_engines = [[names[rank] for rank in own.siblings] for own in shared if own.rank == own.siblings[0]]
    assert of_engines == [["4", "5"], ["6", "7"]]


@pytest.mark.parametrize(
    ("ranks", "same", "size"),
    [(8, 1, 1), (8, 1, 2), (8, 1, 4), (8, 1, 8), (4, 2, 2), (4, 2, 4), (64, 8, 8), (64, 4, 8)],
)
def test_engines_of_machines_with_eight_gpus_have_those_of_their_ranks_and_no_two_the_same(
    ranks, same, size, monkeypatch
):
    """FSDP over one machine, tensor-parallel pairs, and tp_fsdp over eight machines, as docs/scaling.md has them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared = [with_engine_group(divided_of(rank, same, ranks=ranks, per_machine=8), size) for rank in range(ranks)]
    gpus = [(own.rank // 8, gpu_name(str(own.device))) for own in shared]
    engines = [[gpus[rank] for rank in own.siblings] for own in shared if own.rank == own.siblings[0]]
    assert all(own.rank in own.siblings for own in shared)
    assert all(len(engine) == size and len({machine for machine, _ in engine}) == 1 for engine in engines)
    assert sorted(gpu for engine in engines for gpu in engine) == sorted(gpus)
    assert len(set(gpus)) == ranks


def test_processes_of_one_machine_and_of_each_sub_mesh_have_devices_of_their_own(monkeypatch):
    assert [device_of_rank("cuda:0", rank) for rank in range(8)] == [f"cuda:{rank}" for rank in range(8)]
    monkeypatch.setattr("verl.cluster.placement.num_gpus_of", lambda devices: 2)
    document = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    on_command_line = re.search(r"trainer=mesh (.*)", document)
    in_script = re.search(r"mesh = (DeviceMesh\(.*\))", document)
    assert on_command_line
    assert in_script
    settings = [f"++{one}" for one in on_command_line[1].split()]
    run = validate(compose_root("ppo", ["trainer=mesh", "sharding=ddp", *settings]))
    for mesh in (run.trainer.placement, eval(in_script[1], {"DeviceMesh": DeviceMesh})):
        for devices, _ in mesh.groups(ROLES):
            assert len(set(devices)) == len(devices) > 0
            assert set(devices) <= {"cuda:0", "cuda:1"}


def test_tensor_parallel_siblings_keep_their_engine_and_a_cpu_keeps_one_for_each(groups):
    pair = divided_of(1, 2)
    assert with_engine_group(pair, 2) is pair
    assert with_engine_group(pair, 1) is pair
    alone = divided_of(1, 1, "cpu")
    assert with_engine_group(alone, 2) is alone
    assert not groups


def test_ranks_that_make_no_groups_of_that_size_are_refused():
    with refusal("rollout.tensor_parallel_size"):
        with_engine_group(divided_of(0), 3)
    with refusal("rollout.tensor_parallel_size"):
        with_engine_group(divided_of(0, 2), 3)


@pytest.mark.parametrize("same", [1, 2], ids=["fsdp", "tensor-parallel pairs"])
def test_the_prompts_of_a_group_go_to_its_engine_and_each_rank_finds_its_own_rows(same, monkeypatch):
    """Four ranks with one engine: each with rows of its own, or pairs with the same."""
    prompts = random_prompts()
    starts = [0, 3, 5, 6, 6]  # of different numbers; the last has none
    own = [prompts[starts[rank // same] : starts[rank // same + 1]] for rank in range(RANKS)]
    monkeypatch.setattr(
        generation_group, "among_siblings", lambda parallel_info, value: [own[r] for r in parallel_info.siblings]
    )
    groups = [OneGenerates(with_engine_group(divided_of(rank, same), RANKS), same) for rank in range(RANKS)]
    parts = [group.gather(own[rank]) for rank, group in enumerate(groups)]
    assert parts[1:] == [[]] * (RANKS - 1)  # the first generates
    assert [x for part in parts[0] for x in part["prompt_ids"].tolist()] == list(range(starts[RANKS // same]))
    monkeypatch.setattr(generation_group, "from_first", lambda parallel_info, value: parts[0])
    for rank, group in enumerate(groups):
        assert group.scatter([])["prompt_ids"].tolist() == own[rank]["prompt_ids"].tolist()


def test_stages_of_a_pipeline_that_are_no_neighbours_find_their_rows(monkeypatch):
    """Ranks 0 and 2 hold a model in two stages, 1 and 3 another one: the first of each pair generates for both."""
    prompts = random_prompts()
    for rank in range(RANKS):
        info = replace(divided_of(rank), siblings=(rank % 2, rank % 2 + 2))
        group = OneGenerates(info, 2)
        monkeypatch.setattr(generation_group, "from_first", lambda parallel_info, value: [prompts])
        assert bool(group.gather(prompts)) is (rank < 2)
        assert group.scatter([])["prompt_ids"].tolist() == prompts["prompt_ids"].tolist()


class RecordedEngine:
    """Takes the place of `EngineWeights`: a thread reads the stream; what would allocate on a GPU is written down."""

    lora_rank = None

    def __init__(self, events):
        self.events, self.reading = events, threading.Thread()
        self.process = SimpleNamespace(is_busy=lambda: True)
        nothing = lambda *_: None  # noqa: E731
        self.verifier = SimpleNamespace(add_fingerprint=nothing, compute_probe_log_probs=nothing)

    def begin(self, prepare):
        prepare()
        self.events.append("weights")
        return VerifyRequest(ProbeVectors(3), ((1, 2, 3),)), (1, True)

    def describe(self, shapes):
        return EngineInfo(64, 1, num_threads=torch.get_num_threads())

    def begin_load(self, feeds, dtype):
        self.reading = threading.Thread(target=self._read, args=feeds, daemon=True)
        self.reading.start()

    def _read(self, feed):
        reader = StreamReader(feed.handle)
        for number, places in enumerate(feed.chunks):
            assert list(reader.chunk(number, places, torch.float32))
            reader.leave(number)
        reader.close()

    def end_load(self):
        self.reading.join()
        return 0.0

    def begin_verify(self, question, adapter):
        self.events.append("kv_cache")

    def end_verify(self, parts, seconds):
        return {}


def sync_of(model, parallel_info, engine):
    options = {"may_slice": True, "may_repeat": lambda error: False}
    return WeightSync(model, parallel_info, engine, torch.float32, None, 1 << 20, **options)


def test_an_engine_over_two_gpus_allocates_after_all_its_ranks_have_met_without_cached_memory(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(weight_sync, "release_cached", lambda device: events.append("release"))
    monkeypatch.setattr(weight_sync, "meet", lambda parallel_info: events.append("meet"))
    model = TinyModel(hidden_size=32, intermediate_size=64).load_causal_lm("cpu")
    sync = sync_of(model, parallel_info_of(model), RecordedEngine(events))
    try:
        for _ in range(2):
            events.clear()
            sync.run(lambda: events.append("prepare"))
            assert events == ["release", "meet", "prepare", "weights", "release", "meet", "kv_cache"]
    finally:
        sync.close()


@pytest.mark.parametrize(("own", "others"), [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])])
def test_a_worker_opens_memory_of_other_gpus_where_each_gives_it_peer_access(own, others, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or True)
    assert shm_stream.reads_peers(torch.device("cuda", own))
    assert asked == [(own, other) for other in others]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != others[-1])
    assert not shm_stream.reads_peers(torch.device("cuda", own))
    assert shm_stream.reads_peers(torch.device("cpu"))


@pytest.fixture
def streams(monkeypatch):
    """The devices of the streams that are made, in order."""
    found = []

    class Stream(SimpleNamespace):
        def __init__(self, chunk_bytes, readers, device):
            found.append(str(device))
            super().__init__(chunk_bytes=chunk_bytes, handle=None, begin=lambda *_: None, close=lambda: None)

    monkeypatch.setattr(weight_sync, "StreamWriter", Stream)
    return found


@pytest.mark.parametrize(
    ("fed_by", "readers", "reads_peers", "device"),
    [
        (divided_of(1, 2), (0, 1), True, "cuda:1"),  # of a mixture, one process feeds all workers
        (divided_of(1, 2), (0, 1), False, "cpu"),
        (divided_of(1, 2), (1,), False, "cuda:1"),  # the worker on its own GPU
        (divided_of(1, 2), (0,), False, "cpu"),
        (divided_of(1, 2), (0,), True, "cuda:1"),
        (divided_of(0, ranks=1), (0, 1), True, "cuda:0"),  # a single process, and an engine of two GPUs
        (divided_of(0, ranks=1), (0, 1), False, "cpu"),
    ],
)
def test_workers_without_peer_access_read_weights_from_main_memory(fed_by, readers, reads_peers, device, streams):
    sync = sync_of(torch.nn.Linear(2, 2), fed_by, None)
    sync.feed, sync.info = Feed({}, readers, [[]], 1 << 20), EngineInfo(64, 2, reads_peers)
    sync._opened_stream()
    assert streams == [device]
