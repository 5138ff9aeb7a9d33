"""Weights of a divided model on their way to engines, in processes over gloo: bit by bit, and no byte too many."""

import multiprocessing
import os
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
from cases import exhaustive
from rollout.engines import save_family
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache

from verl.component import BuildContext
from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.ops.resharding.plan import lower_bound
from verl.rollout.engine_process.messages import EngineInfo
from verl.rollout.proof.fingerprints import ProbeVectors, fingerprint, join_parts
from verl.rollout.proof.verifier import VerifyRequest, differing
from verl.rollout.weight_sync.state_dict import weights_of
from verl.rollout.weight_sync.stream import StreamReader, StreamWriter
from verl.rollout.weight_sync.sync import WeightSync
from verl.rollout.weight_sync.transfer import WeightTransfer, plan_feeds

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

BY_COLUMNS, WHOLE = ("o_proj.weight", "down_proj.weight"), ("norm.weight",)
VECTORS = ProbeVectors(3)
DTYPE = torch.bfloat16  # narrower than the model's: what travels is cast before it does


def worker_takes(shape, name, worker, workers):
    """What a worker of vLLM takes of a tensor: rows, columns, or all; of the vocabulary blocks of 64 rows."""
    box = [(0, size) for size in shape]
    if name.endswith(WHOLE) or name.endswith("layernorm.weight"):
        return tuple(box)
    axis = int(name.endswith(BY_COLUMNS))
    size = -(-shape[axis] // workers)
    if "embed" in name or "lm_head" in name:
        size = -(-size // 64) * 64
    box[axis] = (min(worker * size, shape[axis]), min((worker + 1) * size, shape[axis]))
    return tuple(box)


QUESTION = VerifyRequest(VECTORS, ((1, 2, 3),))


def stage_of(name):
    """Which of two pipeline stages of an engine has a tensor: of two layers the second, the last norm and the head."""
    return int(name.startswith(("model.layers.1.", "model.norm.", "lm_head.")))


def engines_of(weights, parallel, workers, stages=1):
    """Of each group of siblings; `workers` is None for engines that take whole tensors, otherwise those of a stage."""
    wants = None
    if workers is not None:
        shapes = {w.name: tuple(w.shape) for w in weights}
        wants = tuple(
            {n: worker_takes(s, n, at, workers) for n, s in shapes.items() if stages == 1 or stage_of(n) == stage}
            for stage in range(stages)
            for at in range(workers)
        )
    info, groups = EngineInfo(64, (workers or 1) * stages, True, wants, os.getpid(), "", 60.0), {}
    for rank in range(parallel.world_size):
        groups.setdefault(parallel.degrees.row_share(rank), []).append(rank)
    leaders = {ranks[0]: tuple(ranks) for ranks in groups.values()}
    return [(leaders.get(rank, ()), info if rank in leaders else None) for rank in range(parallel.world_size)]


def fed(sync, weights):
    """What comes out of the stream of a process, and what that has to tell of its part of a sync."""
    share = sync.feed
    stream = sync.stream = StreamWriter(share.chunk_bytes, 1, torch.device("cpu")) if share.chunks else None
    found = {}

    def read():
        reader = StreamReader(stream.handle)
        for number, places in enumerate(share.chunks):
            found.update((name, tensor.clone()) for name, tensor in reader.chunk(number, places, DTYPE))
            reader.leave(number)
        reader.close()

    reading = threading.Thread(target=read, daemon=True)
    if stream is not None:
        stream.begin()
        reading.start()
    moved = sync.push(weights, QUESTION)
    if stream is not None:
        reading.join()
        stream.close()
    return found, moved


def delivered(source, sharding, lora, rank, world_size):
    """Deliver to engines that take whole tensors, to those of two and four workers, and to those of two stages of one
    and two workers, and check all that arrives."""
    context = BuildContext(rank=rank, world_size=world_size)
    model = source.load_causal_lm("cpu")
    if lora:
        torch.manual_seed(0)
        model = LoRA(rank=4).apply(model, causal_lm=True)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    expected = {w.name: w.make().detach().to(DTYPE, copy=True) for w in weights_of(model)}
    parallel = sharding.build(context)
    parallel.shard_model(model)
    siblings = len(model.parallel_info.siblings)
    spied, exchange = [], dist.batch_isend_irecv

    def spy(ops):
        spied.extend(op.tensor.nbytes for op in ops if op.op is dist.irecv)
        return exchange(ops)

    weights, traffic = list(weights_of(model)), []
    engines = (
        [(None, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
        if siblings > 1 and all(w.is_plain for w in weights)
        else [(None, 1)]
    )
    for workers, stages in engines:
        described = engines_of(weights, parallel, workers, stages)
        shares = plan_feeds(described, weights, DTYPE, 1000)
        transfer = WeightTransfer(model.parallel_info, weights, [s.wanted for s in shares], DTYPE, set(), 5000)
        sync = WeightSync(
            model, model.parallel_info, None, DTYPE, None, 1000, may_slice=True, may_repeat=lambda error: False
        )
        share, sync.transfer, sync.info = shares[rank], transfer, described[model.parallel_info.siblings[0]][1]
        sync.feed = share
        dist.batch_isend_irecv = spy
        with CommDebugMode() as others:
            found, moved = fed(sync, weights)
        dist.batch_isend_irecv = exchange
        assert lora or others.get_total_counts() == 0, others.get_comm_counts()
        assert list(found) == list(dict.fromkeys(place.name for chunk in share.chunks for place in chunk))
        for name, tensor in found.items():
            box = tuple(slice(start, stop) for start, stop in share.wanted[name]) if name in share.slices else ()
            if lora:  # the rows of a product may be summed in another order
                torch.testing.assert_close(
                    tensor,
                    expected[name][box],
                    rtol=0.02,
                    atol=1e-3,
                    msg=lambda found, at=(name, box, rank): f"{at}: {found}",
                )
            else:
                assert torch.equal(tensor, expected[name][box]), name
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (moved.received, sum(spied), moved.parts))
        bound = lower_bound(transfer.plan.source, transfer.plan.target)
        assert sum(counted for counted, *_ in everyone) == sum(seen for _, seen, _ in everyone) == bound
        fingerprints = join_parts([parts for *_, parts in everyone])
        assert fingerprints.keys() == {w.name for w in weights if w.form is None}
        for name, mark in fingerprints.items():
            assert lora or differing(fingerprint(expected[name], VECTORS), mark) is None, name
        whole = sum(tensor.nbytes for tensor in expected.values())
        traffic.append((bound / whole, transfer.gathering_bytes / whole))
        spied.clear()
    parallel.close()
    return traffic


def in_process(rank, world_size, rendezvous, answers, *case):
    try:
        _clear_sharding_prop_cache()  # of the process before the fork, where another test may have been rank 0
        os.environ["VERL_RENDEZVOUS"] = f"file://{rendezvous}"
        torch.set_num_threads(1)
        answers.put(delivered(*case, rank, world_size))
    except BaseException:  # noqa: BLE001 - told to the parent
        answers.put(traceback.format_exc())
        answers.close()
        answers.join_thread()  # before the others notice
        os._exit(1)


def in_processes(world_size, tmp_path, *case):
    """The traffic of each delivery, and that of gathering, over the bytes of the model."""
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    arguments = (world_size, str(tmp_path / "rendezvous"), answers, *case)
    workers = [fork.Process(target=in_process, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=300)]
    if not isinstance(found[0], str):
        found += [answers.get(timeout=60) for _ in workers[1:]]
    for worker in workers:
        worker.join(timeout=0 if isinstance(found[0], str) else 60)
        worker.terminate()
    assert not isinstance(found[0], str), found[0]
    assert all(traffic == found[0] for traffic in found)
    return found[0]


@pytest.mark.parametrize("lora", [*exhaustive(False), True], ids=["plain", "lora"])
def test_two_shards_with_an_engine_each_get_what_they_lack(lora, model32, tmp_path):
    ((moved, gathered),) = in_processes(2, tmp_path, model32, Parallel(), lora)
    assert moved == gathered == pytest.approx(1.0, abs=0.01)


@pytest.mark.exhaustive
def test_two_siblings_feed_one_engine_and_gather_nothing_else(model32, tmp_path):
    (whole, gathered), (two, _), (four, _), (stages, _), _ = in_processes(2, tmp_path, model32, Parallel(tp=2), False)
    assert whole == pytest.approx(gathered / 2)
    assert two < 0.2 * whole  # rows of the vocabulary, which vLLM cuts in blocks
    assert four < 0.2 * whole
    assert stages == pytest.approx(whole, rel=0.1)  # each sibling feeds a stage, of which the other has a half


@pytest.mark.exhaustive
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_two_stages_feed_one_engine_and_send_the_second_half_alone(lora, model32, tmp_path):
    (whole, gathered), (two, _), (four, _), (stages, _), _ = in_processes(2, tmp_path, model32, Parallel(pp=2), lora)
    assert 0.3 * gathered < whole < 0.7 * gathered
    assert 0 < two < gathered
    assert two == pytest.approx(four)
    assert stages < 0.2 * two  # each stage feeds its own


LAYOUTS = {  # family, processes, sharding, with an adapter
    "experts": ("qwen3_moe", 2, Parallel(), False),
    "experts ep2": ("qwen3_moe", 2, Parallel(ep=2), False),
    "experts pp2": ("qwen3_moe", 2, Parallel(pp=2), False),
    "experts ep4": ("qwen3_moe", 4, Parallel(ep=4), False),
    "experts ep2 fsdp2": ("qwen3_moe", 4, Parallel(ep=2), False),
    "experts ep2 dp2": ("qwen3_moe", 4, Parallel(ep=2, dp_replicate=2), False),
    "experts ep2 cp2": ("qwen3_moe", 4, Parallel(ep=2, cp=2), False),
    "experts ep2 pp2": ("qwen3_moe", 4, Parallel(ep=2, pp=2), False),
    "stages": ("qwen2", 2, Parallel(pp=2), False),
    "stages of a tied model": ("qwen2_tied", 2, Parallel(pp=2), False),  # the shared matrix is sent once
    "pp dp": ("qwen2", 4, Parallel(pp=2, dp_replicate=2), False),
    "pp dp lora": ("qwen2", 4, Parallel(pp=2, dp_replicate=2), True),
    "pp tp": ("qwen2", 4, Parallel(pp=2, tp=2), False),
    "pp tp lora": ("qwen2", 4, Parallel(pp=2, tp=2), True),
    "pp fsdp": ("qwen2", 4, Parallel(pp=2, dp_shard=2), False),
    "pp fsdp lora": ("qwen2", 4, Parallel(pp=2, dp_shard=2), True),
    "pp cp": ("qwen2", 4, Parallel(pp=2, cp=2), False),
    "pp cp lora": ("qwen2", 4, Parallel(pp=2, cp=2), True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_delivers_bit_by_bit_and_sends_no_more_than_gathering(layout, tmp_path):
    family, processes, sharding, lora = LAYOUTS[layout]
    source = save_family(tmp_path / "model", family)
    (whole, gathered), *others = in_processes(processes, tmp_path, source, sharding, lora)
    assert 0 < whole <= gathered
    if sharding.pp > 1:
        assert whole < gathered
        assert all(moved < gathered for moved, _ in others)  # nothing at all to an engine in the same stages


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sharding", "share"),
    [
        (Parallel(), 1.0),
        (Parallel(dp_replicate=2), 1.0),
        (Parallel(dp_replicate=2, tp=2), 0.5),
        (Parallel(tp=2), 0.5),
        (Parallel(cp=2), 0.5),
    ],
    ids=["fsdp", "hsdp", "tp", "tp_fsdp", "cp"],
)
def test_four_processes_move_the_least_that_does(sharding, share, model32, tmp_path):
    (whole, gathered), *sliced = in_processes(4, tmp_path, model32, sharding, False)
    assert whole == pytest.approx(share * gathered, rel=0.1)
    bound = whole * (1.05 if sharding.cp > 1 else 1)  # parts of FSDP are in no slice
    assert all(moved < bound for moved, _ in sliced[:2])
    assert all(moved <= bound for moved, _ in sliced[2:])  # a stage of one worker takes whole tensors
