"""Operations that a step gives to a GPU, and what it waits for, by stage, for the layers of two models.

Counted on the CPU with narrow layers: the numbers depend on layers, weights, micro-batches and chunks of logits alone.
A call for a list of tensors counts once; a GPU starts a kernel for each 64 tensors or 21 million numbers of it.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from devices.device_syncs import DeviceSyncs, pretend_micro_batches
from devices.flash_kernel import flash_on_cpu
from random_models import save_random_model
from roles import start_actor
from torch.utils._python_dispatch import _disable_current_modes
from trial_rows import TrialRow, as_batch

from verl.engines import chunked_logprobs
from verl.models import fused_norms, parallel_info
from verl.models.fused_norms import fuse_rms_norms
from verl.models.pretrained import Pretrained
from verl.ops.sampling import inverse_cdf_by_blocks
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.proof import fingerprints
from verl.rollout.weight_sync.state_dict import weights_of
from verl.rollout.weight_sync.stream import StreamWriter, plan_chunks
from verl.rollout.weight_sync.transfer import RankTransfer, WeightTransfer
from verl.workers import base
from verl.workers.actor import ActorWorker
from verl.workers.base import load_unsharded

PROMPTS, SAMPLES, PROMPT, NEW = 4, 4, 9, 6
FEW = (2, 3)  # layers that are counted; the numbers of more follow


@dataclass(frozen=True)
class Shape:
    """A model by its layers, and an update of the rows of the comparison with TRL by its parts.

    Attributes:
        chunks: of the logits of a micro-batch on a GPU.
        launches: of an update, at most. It was 4,500 and 9,400 with a kernel for the cast of each weight and gradient,
            and with norms of transformers.
    """

    family: str
    layers: int
    micro_batches: int
    chunks: int
    launches: int


SHAPES = {"135M": Shape("llama", 30, 1, 5, 2800), "1.5B": Shape("qwen2", 28, 2, 33, 6000)}
PER_UPDATE = 4  # metrics in one question, the gap, the norm, and the scale of the gradients


def saved(shape: Shape, layers: int, directory: Path) -> Pretrained:
    options = {"num_hidden_layers": layers, "tie_word_embeddings": True}
    return Pretrained(path=str(save_random_model(directory / str(layers), shape.family, torch.float32, **options)))


def rows() -> DataProto:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, 60, (PROMPT,), generator=draw) for _ in range(PROMPTS)]
    batch = as_batch([TrialRow(x, torch.randint(4, 60, (NEW,), generator=draw)) for x in texts for _ in range(SAMPLES)])
    shape = batch["response_mask"].shape
    return batch.union(DataProto.from_dict({"advantages": torch.randn(shape), "rollout_log_probs": torch.zeros(shape)}))


def continued(counted, layers: int) -> Counter[str]:
    """The counts of `layers` layers, from those of a few: each layer adds as much as the one before."""
    few, more = (counted(number) for number in FEW)
    return Counter({name: few[name] + (layers - FEW[0]) * (more[name] - few[name]) for name in {*few, *more}})


def on_device(syncs: DeviceSyncs, actor: ActorWorker) -> None:
    syncs.on_device([*actor.engine.model.parameters(), *actor.engine.model.buffers()])
    syncs.on_device([x for state in actor.engine.optimizer.state.values() for x in state.values()])


def counted(syncs: DeviceSyncs, work) -> Counter[str]:
    syncs.counts.clear()
    syncs.names.clear()
    with syncs:
        work()
    return syncs.names + Counter({f"waits by {name}": count for name, count in syncs.counts.items()})


VIEWS = {"t", "transpose", "_unsafe_view", "split", "view"}


def launches(found: Counter[str]) -> int:
    return sum(count for name, count in found.items() if not name.startswith("waits") and name not in VIEWS)


class NormKernels:
    """The fused kernel of norms as it counts on a GPU: one forward, three backward."""

    def __init__(self, syncs: DeviceSyncs):
        plain = torch.rms_norm

        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, epsilon):
                ctx.save_for_backward(x, weight)
                ctx.epsilon = epsilon
                syncs.names["norm"] += 1
                with _disable_current_modes():
                    return syncs.on_device(plain(x, weight.shape, weight, epsilon))

            @staticmethod
            def backward(ctx, gradient):  # type: ignore[override]
                syncs.names["norm backward"] += 3
                with _disable_current_modes(), torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                    out = plain(inputs[0], inputs[1].shape, inputs[1], ctx.epsilon)
                    found = torch.autograd.grad(out, inputs, gradient)
                return *syncs.on_device(found), None

        self.norm = Norm

    def __call__(self, x, shape, weight, epsilon):
        return self.norm.apply(x, weight, epsilon)


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Norms are fused as a model is loaded, as on a GPU: before its execution paths are looked up."""
    load = lambda *given, **of: fuse_rms_norms(model := load_unsharded(*given, **of)) and model  # noqa: E731
    monkeypatch.setattr(base, "load_unsharded", load)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("name", SHAPES)
def test_an_update_starts_few_kernels(name, tmp_path, monkeypatch):
    shape, syncs, batch = SHAPES[name], pretend_micro_batches(monkeypatch), rows()
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_has_foreach_support", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(fused_norms.F, "rms_norm", NormKernels(syncs))
    monkeypatch.setattr(chunked_logprobs, "uses_kernels", lambda logits: True)
    monkeypatch.setattr(parallel_info, "compute_device", lambda model: torch.device("meta"))  # gradients are held
    budget = -(-PROMPTS // shape.micro_batches) * (PROMPT + SAMPLES * NEW)
    per_chunk = -(-PROMPTS * SAMPLES * NEW // shape.micro_batches // shape.chunks)

    def update(layers: int) -> Counter[str]:
        actor = start_actor(saved(shape, layers, tmp_path), autocast="bfloat16", micro_batch_tokens=budget)
        assert actor.engine.paths(batch).scoring == "packed"
        at_a_time = per_chunk * actor.model.config.vocab_size
        monkeypatch.setattr(chunked_logprobs, "logits_at_a_time", lambda device: at_a_time)
        with flash_on_cpu(monkeypatch):
            actor.update(batch)
            on_device(syncs, actor)
            return counted(syncs, lambda: actor.update(batch))

    found = continued(update, shape.layers)
    assert launches(found) <= shape.launches, found.most_common(60)
    assert sum(count for kind, count in found.items() if kind.startswith("waits")) <= PER_UPDATE, found


class CountedGraphs:
    """A graph counts as one launch, whatever it replays."""

    def __init__(self, syncs: DeviceSyncs):
        self.syncs, self.made = syncs, 0

    def __call__(self, work):
        self.made += 1

        def replay() -> None:
            others = Counter(self.syncs.names)
            with _disable_current_modes(), torch.no_grad():
                work()
            self.syncs.names = others + Counter({"graph": 1})

        return replay


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [*((name, 900) for name in SHAPES), ("graphs", 10)])
def test_a_token_of_all_rows_starts_few_kernels(name, most, tmp_path, monkeypatch):
    """Kernel by kernel some 50 are outside of the model; it was 1,260 with norms of transformers. With graphs: the
    graph, its inputs and outputs, and the question whether rows have ended."""
    shape, syncs = SHAPES.get(name, SHAPES["135M"]), DeviceSyncs()
    if name == "graphs":
        graphs = CountedGraphs(syncs)
        monkeypatch.setattr("verl.rollout.hf_rows.graph_maker", lambda model, device, *, records_experts: graphs)
    monkeypatch.setattr("verl.rollout.token_sampler.inverse_cdf", inverse_cdf_by_blocks)  # as on a GPU
    monkeypatch.setattr(fused_norms.F, "rms_norm", NormKernels(syncs))
    prompts = DataProto.from_dict(
        {
            "prompts": torch.full((PROMPTS, PROMPT), 5),
            "prompt_mask": torch.ones(PROMPTS, PROMPT, dtype=torch.bool),
            "prompt_ids": torch.arange(PROMPTS),
            "group_ids": torch.arange(PROMPTS),
        }
    )

    def token(layers: int) -> Counter[str]:
        found = []
        for new in (6, 14):
            rollout = HFRollout(max_new_tokens=new, sleep=False)
            actor = start_actor(saved(shape, layers, tmp_path), rollout, autocast="bfloat16")
            engine: Any = actor.generator.engine
            engine.key_multiple, engine.stop_ids = 64, torch.zeros(0, dtype=torch.int64)  # all rows have all tokens
            for _ in range(2):
                actor.generate(prompts, GenerationRequest(0, SAMPLES))
            on_device(syncs, actor)
            if engine.memory is not None:
                syncs.on_device([engine.memory.inputs, engine.memory.noise, *engine.memory.outputs.values()])
            found.append(counted(syncs, lambda actor=actor: actor.generate(prompts, GenerationRequest(0, SAMPLES))))
        return Counter({kind: (found[1][kind] - found[0][kind]) / 8 for kind in found[1]})

    found = continued(token, shape.layers)
    assert launches(found) <= most, found.most_common(60)
    assert sum(count for kind, count in found.items() if kind.startswith("waits")) <= 1, found


SYNCS = {"135M": (9, 110), "1.5B": (1, 720)}  # layers that are cast and sent together (64 MiB), and launches at most


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCS)
def test_the_trainer_starts_few_kernels_in_a_sync(name, tmp_path, monkeypatch):
    """Casts, fingerprints and the copies to the engine; it was 1,510 and 1,750 tensor by tensor."""
    (together, most), syncs = SYNCS[name], DeviceSyncs()
    model = saved(SHAPES[name], SHAPES[name].layers, tmp_path).load_causal_lm("cpu")
    layer = 2 * sum(p.numel() for p in model.model.layers[0].parameters())
    monkeypatch.setattr(fingerprints, "is_in_main_memory", lambda x: False)
    weights = list(weights_of(model))
    whole = {w.source: tuple((0, n) for n in w.tensor.shape) for w in weights}
    info, vectors = parallel_info.parallel_info_of(model), fingerprints.ProbeVectors(1)
    transfer = WeightTransfer(info, weights, [whole], torch.bfloat16, set(), limit_bytes=together * layer)
    chunks, size = plan_chunks({w.name: w.shape for w in weights}, torch.bfloat16, 2**30)
    stream = StreamWriter(size, 1, torch.device("cpu"))
    syncs.on_device([*model.parameters(), stream._chunks])

    def sync() -> None:
        moved = RankTransfer()
        stream.fill(chunks, transfer.tensors(weights, moved, vectors, set(whole)), torch.bfloat16, lambda: True)
        assert len(moved.parts) == len(whole)

    sync()
    found = counted(syncs, sync)
    stream.close()
    assert launches(found) <= most, found.most_common(20)
    assert found["waits by cpu"] == 1, found  # all fingerprints in one copy
