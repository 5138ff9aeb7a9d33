"""What attention asks of a device, what moves to it without being waited for, and which processes give memory back."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import exhaustive
from devices.device_syncs import DeviceSyncs
from model_paths.families import FAST
from random_models import save_random_classifier, save_random_model
from rewards.rated import built, rollout
from roles import start_actor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from trial_rows import TrialRow, as_batch

from verl.cluster import placement
from verl.cluster.placement import DeviceMesh
from verl.component import BuildContext
from verl.compose import warm_start
from verl.engines import engine as engine_module
from verl.engines.parallel_dims import Parallelism
from verl.model_paths import context_attention
from verl.model_paths.check import finding_for
from verl.model_paths.context_attention import ContextGroup
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.model_paths.packed_attention import attend_line
from verl.models.tiny import TinyModel
from verl.ops import attention, sampling
from verl.ops.attention import attend_heads
from verl.ops.packing import AttentionBlock, pack
from verl.ops.sampling import inverse_cdf_by_blocks
from verl.rewards import reward_model
from verl.rollout.base import TurnLimits, TurnRequest
from verl.rollout.hf import HFRollout
from verl.utils import seeding
from verl.utils.memory import on_current_device
from verl.workers import colocated
from verl.workers.colocated import RoleProcess

PROMPTS, RESPONSES = torch.tensor([5, 5, 5, 2, 1, 9]), torch.tensor([14, 3, 1, 7, 2, 30])
HEADS, KINDS, WIDTH = 4, 2, 8


def packed_line(share=True):
    mask = torch.arange(30) < RESPONSES[:, None]
    return pack(PROMPTS, RESPONSES, torch.tensor([0, 0, 0, 1, 2, 3]), mask, 9, share, 64)


def heads_of_line(packing, device="cpu", dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    sizes = [(len(packing.tokens), heads, WIDTH) for heads in (HEADS, KINDS, KINDS)]
    return [torch.randn(size, generator=draw).to(device, dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_no_block_of_attention_writes_down_its_scores_on_a_device(dtype, window, monkeypatch):
    """Kernels of a GPU that take a mask, or float32, need as many heads of keys as of queries; else torch takes the one
    that holds all scores."""
    asked = []

    def recorded(query, key, value, attn_mask, is_causal, scale, enable_gqa):
        asked.append((attn_mask is not None, is_causal, enable_gqa, query.shape[1], key.shape[1]))
        return torch.empty_like(query)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    packing = packed_line().to("meta")  # a device that is not the CPU
    attend_line(*heads_of_line(packing, "meta", dtype), packing, window, None)
    for has_mask, is_causal, fewer, heads, kinds in asked:
        assert has_mask is not is_causal
        assert (heads == kinds and not fewer) or (fewer and not has_mask and dtype == torch.bfloat16)
    assert {has_mask for has_mask, *_ in asked} == ({True, False} if window is None else {True})


def test_repeated_keys_change_no_number_but_by_rounding(monkeypatch):
    q, k, v = (torch.randn(3, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.rand(3, 1, 6, 6) < 0.5
    mask[..., 0] = True
    for given in (None, mask):
        fewer = attend_heads(q, k, v, given, None)
        monkeypatch.setattr(attention, "takes_fewer_heads", lambda *_: False)
        repeated = attend_heads(q, k, v, given, None)
        monkeypatch.undo()
        torch.testing.assert_close(fewer, repeated, rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (fewer, repeated)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.fixture
def first_of_two():
    """A group of two processes of which this one alone is there; the other's tokens are zeros."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("style", ["allgather", "ulysses"])
def test_attention_over_shared_tokens_asks_the_device_nothing(style, first_of_two, monkeypatch):
    monkeypatch.setattr(context_attention, "keeps_sums", lambda *_: False)  # as on a GPU
    line, syncs = ContextGroup(None, 2, 0, style).shard(packed_line()), DeviceSyncs()
    heads = [x[: len(line.tokens)].detach().requires_grad_() for x in heads_of_line(line)]
    syncs.on_device([heads, line.tokens, line.positions, *tensors_of(line.shard), *tensors_of(line.whole)])
    with syncs, monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor is made in main memory for each layer"))
        line.attend(*heads, None, None, attend_line).sum().backward()
    assert syncs.launches > 20
    assert not sum(syncs.counts.values()), syncs.counts


def tensors_of(value):
    """All tensors of a dataclass, and of those that it has, but for lengths, which stay in main memory."""
    if isinstance(value, AttentionBlock):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (x for part in value for x in tensors_of(part))
    elif hasattr(value, "__dataclass_fields__"):
        yield from (x for name in value.__dataclass_fields__ for x in tensors_of(getattr(value, name)))


class Moves(TorchFunctionMode):
    """Counts tensors that are moved to a device, by whether the process waits."""

    def __init__(self):
        super().__init__()
        self.waited = self.sent = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "to" and any(isinstance(x, (torch.device, str)) for x in args[1:]):
            sends = (kwargs or {}).get("non_blocking", False)
            self.sent, self.waited = self.sent + sends, self.waited + (not sends)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [None, ContextGroup(None, 2, 1)], ids=["own tokens", "shared tokens"])
def test_a_micro_batch_comes_to_the_device_without_being_waited_for(context):
    batch = as_batch([TrialRow(torch.arange(4, 24), torch.arange(4, 4 + n)) for n in (9, 20, 14)])
    (micro,) = cut_into_micro_batches(batch, 1000, FAST, context)
    with Moves() as moves:
        there = micro.to(torch.device("meta"))
    assert moves.sent > 10
    assert not moves.waited
    assert {x.device.type for x in tensors_of(replace(there, rows=torch.empty(0, device="meta")))} <= {"meta", "cpu"}
    assert all(
        x.device.type == "meta" for x in (*there.tensors.values(), *there.positions, *tensors_of(there.packing.tokens))
    )


@pytest.mark.parametrize("options", [{}, *exhaustive({"min_new_tokens": 4}, {"top_k": 5})], ids=str)
def test_a_token_waits_once(options, monkeypatch):
    """Of responses and of episodes, which are drawn by the same loop."""
    monkeypatch.setattr("verl.rollout.token_sampler.inverse_cdf", inverse_cdf_by_blocks)  # as on a GPU
    actor = start_actor(TinyModel(hidden_size=32, intermediate_size=64), HFRollout(max_new_tokens=40, **options))
    syncs, found = DeviceSyncs(), {}
    syncs.on_device([*actor.model.parameters(), *actor.model.buffers()])
    for new in (8, 24):
        actor.generator.engine.stop_ids = torch.zeros(0, dtype=torch.int64)  # all turns have all tokens
        engine = actor.generator.engine.turns(TurnLimits(80, 0.1))
        for episode in range(3):
            engine.add(TurnRequest(episode, list(range(4, 9 + episode)), episode, 0, 0, new))
        syncs.counts.clear()
        with syncs, Moves() as moves, torch.no_grad():
            while engine.num_pending:
                engine.advance()
        found[new] = sum(syncs.counts.values()), moves.waited
    assert (found[24][0] - found[8][0]) / 16 <= 1, found
    assert found[24][1] == found[8][1]


def test_scores_of_a_reward_model_come_to_main_memory_once_whatever_the_number_of_micro_batches(tmp_path, monkeypatch):
    path, given_back, found = save_random_classifier(tmp_path, "llama"), [], {}
    monkeypatch.setattr(reward_model, "release_cached", given_back.append)
    for budget in (1, 4096):
        reward, syncs = built(path, micro_batch_tokens=budget), DeviceSyncs()
        syncs.on_device(list(reward.model.parameters()))
        with syncs:
            reward.score_batch(rollout())
        found[budget] = {
            name: count for name, count in syncs.counts.items() if name != "item"
        }  # transformers, of masks
    assert found[1] == found[4096]
    assert found[1]["cpu"] <= 2
    assert given_back == [reward.device] * 2  # an engine may wake on the same device, from another process


def test_another_thread_goes_on_with_the_device_of_the_one_that_starts_it(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append((index, threading.current_thread().name)))
    thread = threading.Thread(target=on_current_device(chosen.append), args=("ran",), name="other")
    thread.start()
    thread.join(10)
    assert chosen == [(3, "other"), "ran"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert on_current_device(chosen.append) == chosen.append  # a process without a GPU takes none


def test_processes_that_share_a_device_give_back_what_torch_keeps_after_each_call(monkeypatch):
    given_back, told = [], {}
    monkeypatch.setattr(colocated, "release_cached", lambda device, **_: given_back.append(device))

    def start(part, context, *_, name, **__):
        told[name] = context.shares_device
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(placement, "LocalWorkerGroup", start)
    monkeypatch.setattr(placement, "RoleGroups", list)
    meshes = ((("cuda:1",), {"actor": False, "critic": False}), (("cuda:0", "cuda:1"), {"actor": True, "critic": True}))
    for of_critic, wanted in meshes:
        mesh = DeviceMesh(devices=("cuda:0",), sub_meshes={"critic": of_critic})
        host = SimpleNamespace(
            worker_types=lambda: {"actor": object, "critic": object},
            only=lambda members, size: SimpleNamespace(
                shardings=lambda: {"actor": SimpleNamespace(call_timeout_s=1.0)}
            ),
        )
        told.clear()
        mesh.start(host, BuildContext(), 1, 1)
        assert told == wanted
    role = SimpleNamespace(update=lambda batch: batch)
    for device in ("cuda:1", None):
        assert RoleProcess(workers={"critic": role}, shared_device=device).call("critic", "update", (1,)) == 1
    assert given_back == ["cuda:1"]


def test_the_key_of_a_warm_start_names_the_gpu_without_opening_a_context(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: pytest.fail("it opens a context in the driver"))
    monkeypatch.setattr(warm_start, "as_plain", lambda run: {})
    names = iter(["NVIDIA H100", "NVIDIA A100"])
    monkeypatch.setattr(warm_start, "gpu_name_from_outside", lambda index: next(names))
    assert warm_start.cache_key(None) != warm_start.cache_key(None)


@pytest.fixture
def deterministic():
    """Deterministic algorithms, as a run on a GPU demands them; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.usefixtures("deterministic")
def test_on_a_gpu_kernels_that_are_not_deterministic_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.random.fork_rng(devices=[]), seeding.kept_generators():
        seeding.seed_everything(0)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


class RefusingDevice(TorchDispatchMode):
    """Raises where a GPU would: cumulative sums of floats while deterministic algorithms are demanded."""

    refused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cumsum.default and found.is_floating_point():
            self.refused += 1
            assert not torch.are_deterministic_algorithms_enabled()
        return found


@pytest.mark.usefixtures("deterministic")
def test_sampling_on_a_device_exempts_its_cumulative_sums_and_nothing_else():
    probs, noise = torch.empty(3, 1000, device="meta"), torch.empty(3, device="meta")
    with RefusingDevice() as device:
        sampling.inverse_cdf(probs, noise)
        sampling._nucleus_floor(probs[:, :200], 0.9)
    assert device.refused == 3
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.usefixtures("deterministic")
def test_a_model_that_is_probed_is_not_refused_for_a_kernel_that_a_gpu_refuses(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_random_model(tmp_path, "qwen2", torch.float32))
    plain = model.forward
    model.forward = lambda *given, **named: (torch.ones(2).cumsum(0), plain(*given, **named))[1]
    with RefusingDevice() as device:
        finding = finding_for(model)
    assert device.refused
    assert (finding.refusal, finding.nondeterministic) == (None, None)  # which warns
    assert torch.are_deterministic_algorithms_enabled()


MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}


@pytest.mark.parametrize(
    ("family", "options", "operations"),
    [("qwen2", {}, set()), ("qwen3_moe", {}, set()), ("mamba2", MAMBA2, {"cumsum"})],
)
@pytest.mark.usefixtures("deterministic")
def test_families_with_operations_that_a_gpu_refuses_are_found_before_the_first_step(
    family, options, operations, tmp_path, monkeypatch, caplog
):
    model = AutoModelForCausalLM.from_pretrained(save_random_model(tmp_path, family, torch.float32, **options))
    assert set(finding_for(model).nondeterministic) == operations
    monkeypatch.setattr(engine_module, "compute_device", lambda model: torch.device("meta"))
    engine_module.TrainingEngine(model, Parallelism(), 100)
    assert torch.is_deterministic_algorithms_warn_only_enabled() is bool(operations)
    assert bool([text for text in caplog.messages if "cumsum" in text]) is bool(operations)
