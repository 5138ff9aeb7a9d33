"""Started by test_second_device.py in a process of its own: the trainer's parts on a device that is not the CPU.

The device is pretended: torch's Python backend under the name `fakegpu`, with tensors without data, and a group of two
processes of which one is there. Operations on tensors of two devices raise, as they do on a GPU. It has one device and
streams that do nothing, and FSDP's backward pass does not run on it.

Writes {name of a check: "" or what was wrong} as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from model_paths.families import FAST
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from trial_rows import TrialRow, as_batch

from verl.component import BuildContext
from verl.engines import chunked_logprobs, engine
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import BLOCK_MULTIPLE, TrainingEngine
from verl.engines.fsdp import units_of
from verl.engines.optimizer import AdamW
from verl.engines.sharding import FSDP
from verl.model_paths import packed_attention
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models import heads
from verl.models.heads import LMHead
from verl.models.lora import LoRA
from verl.models.parallel_info import compute_device
from verl.ops.resharding.dtensor import local
from verl.rollout import model_log_probs
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof.fingerprints import HostCopies, ProbeVectors
from verl.rollout.proof.probe import probe_rows
from verl.rollout.weight_sync import state_dict
from verl.rollout.weight_sync.transfer import RankTransfer, WeightTransfer

NAME = "fakegpu"
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip


def nothing(*_: Any, **__: Any) -> None:
    pass


class Stream:
    __init__ = wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, event: Any = None) -> Any:
        return Event()


class Event(Stream):
    def query(self) -> bool:
        return True


class Backend(backend_registration._DummyBackendModule):
    Stream, Event = Stream, Event
    set_device = synchronize = nothing

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def pretend() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    make = torch.tensor  # which builds its numbers on the device itself

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = make(data, **options)
        is_there = device is not None and torch.device(device).type == NAME
        return torch.empty(made.shape, dtype=made.dtype, device=device) if is_there else made

    torch.tensor = tensor


class Answers(TorchDispatchMode):
    """What is asked of a tensor is answered with 1: there are no numbers. One that has some loses them on its way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor):
            options = {name: x for name, x in (kwargs or {}).items() if name in ("dtype", "device")}
            return torch.empty_strided(args[0].size(), args[0].stride(), **{"dtype": args[0].dtype, **options})
        return func(*args, **(kwargs or {}))


class NoFiles:
    """Weights of the right shapes, in the place of a checkpoint's."""

    def read(self, name: str, box: Any = None) -> Tensor:
        return torch.empty([stop - start for start, stop in box])

    def name_of(self, name: str) -> None:
        return None


class Checks:
    """Of an actor over two processes whose weights rest on the device, or in main memory.

    Attributes:
        found: of each check, what was wrong, or nothing.
    """

    def __init__(self, offload: bool, lora: LoRA | None = None):
        self.found: dict[str, str] = {}
        self.offload = offload
        parallel = FSDP(cpu_offload=offload).build(BuildContext(device=f"{NAME}:0", rank=0, world_size=2))
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, attn_implementation="sdpa")
            if lora is not None:
                self.model = lora.apply(self.model, causal_lm=True)
        self.model.weight_files = NoFiles()
        self.batch = as_batch([TrialRow(torch.arange(4, 24), torch.arange(4, 4 + n)) for n in (9, 20, 14)])
        made = cut_into_micro_batches(self.batch, 1000, FAST, None, BLOCK_MULTIPLE)
        self.micros = [replace(micro, positions=micro.on_mask) for micro in made]
        for micro in self.micros:
            micro.packing.slots()  # reads numbers
        with self.device():
            parallel.shard_model(self.model, "bfloat16")
            self.engine = TrainingEngine(self.model, parallel, 1000, None, autocast="bfloat16")
        self.parallel = parallel

    @contextlib.contextmanager
    def device(self) -> Iterator[None]:
        with FakeTensorMode(allow_non_fake_inputs=True), Answers():
            yield

    def __call__(self, name: str, work: Callable[[], Any]) -> None:
        try:
            work()
            self.found[name] = ""
        except Exception as error:  # noqa: BLE001 - told to the test
            place = traceback.extract_tb(error.__traceback__)[-6:]
            self.found[name] = f"{type(error).__name__}: {str(error)[:300]} {[(x.filename, x.lineno) for x in place]}"

    def run(self) -> None:
        self("weights rest where they should", self.rests)
        self("the model computes on the device", self.computes)
        self("rows are packed", self.packs)
        for number in ("first", "second"):  # what the first leaves behind is found by the second
            self(f"log-probs, {number}", self.scores)
            self(f"weights go to an engine, {number}", self.sends)
            self(f"the probe, {number}", self.probes)
            self(f"nothing stays gathered, {number}", self.rests)
        self("the optimizer goes on from a checkpoint", self.resumes)
        self("an adapter is merged", self.merges)

    def rests(self) -> None:
        here = {p.device.type for p in self.model.parameters()}
        assert here == ({"cpu"} if self.offload else {NAME}), here
        assert all(unit._get_fsdp_state()._fsdp_param_group.is_sharded for unit in units_of(self.model))

    def computes(self) -> None:
        assert compute_device(self.model) == self.engine.device == torch.device(NAME, 0)
        tokens = torch.tensor([[5, 6, 7]])
        with self.device():
            assert self.model(input_ids=tokens.to(NAME), use_cache=False).logits.device.type == NAME
            self.model.parallel_info.free_gathered_parameters()
            try:
                torch.ones(3) + torch.ones(3, device=NAME)
            except RuntimeError:
                return
        raise AssertionError("tensors of two devices were mixed")

    def packs(self) -> None:
        """Decided by a small copy of the model, on the CPU; then all tensors of a packed line come to the device."""
        assert self.engine.paths(self.batch).scoring == "packed", self.engine.paths(self.batch)
        with self.device():
            for micro in self.micros:
                packing = micro.to(self.engine.device).packing
                assert packing is not None
                slots = packing.slots(self.engine.device)
                taken = [slots.queries, slots.keys, slots.out, packing.predictors]
                devices = {x.device.type for how in taken for x in (how.index, *how.uses)}
                assert devices | {packing.tokens.device.type, packing.positions.device.type} == {NAME}, devices

    def scores(self) -> None:
        assert packed_attention.is_enabled(self.model)
        engine.cut_into_micro_batches = lambda *given: iter(self.micros)
        packed_attention.have_equal_lengths = lambda block: False  # reads numbers
        packed_attention.describe_mask = lambda function, length: packed_attention.MaskShape()
        LMHead.is_whole_state = lambda self: True
        with self.device():
            head = LMHead(self.model)
            self.engine.paths = lambda batch: FAST
            for at_a_time in (2**24, 64 * 16):
                chunked_logprobs.LOGITS_AT_A_TIME = at_a_time // 8
                found = self.engine.infer(
                    self.batch, lambda model, micro: {"found": token_log_probs(model, head, micro).log_probs}
                )["found"]
                assert found.device.type == "cpu", found.device

    def sends(self) -> None:
        with self.device():
            weights = [w for _, w in state_dict.live_weights(self.model, True)]  # `weights_of` asks for addresses
            shapes = {w.name: tuple(w.shape) for w in weights}
            whole = {name: tuple((0, size) for size in shape) for name, shape in shapes.items()}
            wants: list[Any] = [whole, {}]  # the first of both feeds the engine
            transfer = WeightTransfer(self.model.parallel_info, weights, wants, torch.bfloat16, set())
            moved = RankTransfer()
            made = dict(transfer.tensors(weights, moved, ProbeVectors(3), shapes))
        assert {x.device.type for x in made.values()} == {NAME}
        assert {name: tuple(x.shape) for name, x in made.items()} == shapes
        assert len(moved.parts) > 10

    def resumes(self) -> None:
        with self.device():
            trained = TrainingEngine(self.model, self.parallel, 1000, AdamW(lr=1e-3))
            saved = {
                f"{name}.{key}": torch.ones(() if key == "step" else p.shape)
                for name, p in trained.parameters.items()
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
            trained.load_optimizer(saved, 1)
            for parameter in trained.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            trained.optimizer.step()
            places = {
                (local(p).device.type, local(x).device.type)
                for p in trained.parameters.values()
                for x in trained.optimizer.state[p].values()
            }
            trained.optimizer.zero_grad()
        rests = "cpu" if self.offload else NAME
        assert places == {(rests, rests)}, places

    def merges(self) -> None:
        adapted = Checks(self.offload, LoRA(rank=2)).model
        with self.device():
            sources = dict(state_dict.live_weights(adapted.get_base_model(), True))
            places = {name: (local(x.present()).device, local(x.tensor).device) for name, x in sources.items()}
        assert any(name.endswith("q_proj.weight") for name in places)
        assert {name: both for name, both in places.items() if both[0] != both[1]} == {}

    def probes(self) -> None:
        rows = probe_rows(64)
        with self.device():
            trainer_log_probs(self.model, rows, "bfloat16")


def checked(offload: bool) -> dict[str, str]:
    checks = Checks(offload)
    checks.run()
    return checks.found


def copied_without_numbers(copies: HostCopies) -> None:
    waiting, copies._waiting = copies._waiting, []
    if waiting:
        torch.cat([x.reshape(-1) for x, _ in waiting]).to("cpu")


def main() -> None:
    model_log_probs.as_array = lambda x: x.detach().float().to("cpu")
    HostCopies.finish = copied_without_numbers
    found = planted() if "planted" in sys.argv else {"on the device": checked(False), "offloaded": checked(True)}
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


def planted() -> dict[str, dict[str, str]]:
    """What the checks say of two faults."""
    found = {}
    before = model_log_probs.release_gathered
    model_log_probs.release_gathered = lambda model: None
    found["planted: the probe keeps what it gathers"] = checked(True)
    model_log_probs.release_gathered = before
    for module in (engine, heads, model_log_probs):
        module.compute_device = lambda model: next(model.parameters()).device
    found["planted: it computes where weights rest"] = checked(True)
    return found


if __name__ == "__main__":
    pretend()
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=0, world_size=2)
    main()
