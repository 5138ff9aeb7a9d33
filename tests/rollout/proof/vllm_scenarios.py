"""Syncs to a vLLM engine, with faults planted in them; runs in a process of its own, and prints what became of each.

    python tests/rollout/proof/vllm_scenarios.py MODEL_DIR:DTYPE:KIND ...

KIND is `weights`, `experts` or `adapter`. The last line is JSON: for each argument, scenario -> {"names": of tensors at
fault, "text": of the error, "metrics": of a proof}.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from verl.errors import WeightSyncError
from verl.models.hf_state_dict import hf_state_dict, live_tensors
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof import SyncVerifier, probe_rows
from verl.rollout.proof.fingerprints import plain_name
from verl.rollout.vllm.server.layer_fingerprints import packed, unpacked
from verl.rollout.vllm.server.verification import answer_request

Stream = Iterable[tuple[str, Tensor]]
CONTEXT, RANK = 64, 8


class Pair:
    """A trainer's model and an engine with the same weights, which follow each other by syncs."""

    def __init__(self, path: str, dtype: str, **options: Any):
        from vllm import LLM

        from verl.rollout.vllm.server.engine_server import inspect_here

        inspect_here(path)
        self.dtype = getattr(torch, dtype)
        source = Pretrained(path=path)
        self.model = source.load_causal_lm("cpu")
        if self.dtype != torch.float32:
            self.model.to(self.dtype)
        self.llm = LLM(
            path,
            dtype=dtype,
            enforce_eager=True,
            worker_extension_cls="verl.rollout.vllm.server.worker_extension.WorkerExtension",
            max_model_len=CONTEXT,
            skip_tokenizer_init=True,
            max_num_seqs=8,
            max_num_batched_tokens=CONTEXT,
            kv_cache_memory_bytes=16 << 20,
            **options,
        )
        self.prover = self.new_prover(self.dtype)

    def new_prover(self, dtype: torch.dtype) -> SyncVerifier:
        return SyncVerifier(self.model, dtype, probe_rows(40, CONTEXT), partial(trainer_log_probs, self.model))

    def train(self, lr: float) -> None:
        """One update of AdamW, from random gradients."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        torch.optim.AdamW(trained, lr=lr).step()

    def sync(self, change: Callable[[Stream], Stream] = lambda stream: stream, *, mend: bool = True) -> dict[str, Any]:
        """Send all weights, `change` them on the way, and prove."""
        question = self.prover.question()
        tensors = hf_state_dict(self.model).tensors
        for name, x in tensors.items():
            self.prover.add_fingerprint(name, x)
        stream = change(iter(tensors.items()))
        if mend:
            self.llm.apply_model(renew_experts)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        if mend:
            self.llm.apply_model(mend_tied_head)
        return self.prove(lambda: answer_request(self.llm, question))

    def prove(self, ask: Callable[[], Any]) -> dict[str, Any]:
        """What became of a proof."""
        try:
            return {"names": [], "text": "", "metrics": self.prover.verify(ask())}
        except WeightSyncError as error:
            return {"names": list(error.names), "text": str(error)}

    def close(self) -> None:
        """Let go of the engine, so that another can be started in this process."""
        del self.llm
        gc.collect()


def mend_tied_head(model: Any) -> None:
    """vLLM leaves the packed copy of a tied head as it was."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def renew_experts(model: Any) -> None:
    """vLLM packs experts for the CPU with the first load alone, unless their kernel has to be made anew."""
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def swapped(first: str, second: str) -> Callable[[Stream], Iterator[tuple[str, Tensor]]]:
    """Each under the other's name."""
    names = {first: second, second: first}
    return lambda stream: ((names.get(name, name), tensor) for name, tensor in stream)


def left_out(name: str) -> Callable[[Stream], Iterator[tuple[str, Tensor]]]:
    return lambda stream: (item for item in stream if item[0] != name)


def replaced(name: str, by: Tensor) -> Callable[[Stream], Iterator[tuple[str, Tensor]]]:
    return lambda stream: ((n, by if n == name else tensor) for n, tensor in stream)


def weight_scenarios(pair: Pair) -> Iterator[tuple[str, dict[str, Any]]]:
    """Syncs of all weights, one after another, each after an update."""
    lr = 1e-5 if pair.dtype == torch.float32 else 1e-2  # bfloat16 itself would swallow the smaller one
    last = f"model.layers.{pair.model.config.num_hidden_layers - 1}"
    attention, late = "model.layers.0.self_attn", f"{last}.mlp.down_proj.weight"
    yield "first", pair.sync()
    pair.train(lr)
    yield "clean", pair.sync()
    pair.train(lr)
    yield "stale head", pair.sync(mend=False)
    yield "swapped", pair.sync(swapped(f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"))
    pair.train(lr)
    now = pair.model.state_dict()
    held_late = now[late].clone()
    pair.train(lr)
    yield "stale", pair.sync(replaced(late, held_late))
    for name in (f"{last}.self_attn.q_proj.bias", f"{last}.self_attn.q_norm.weight", f"{last}.input_layernorm.weight"):
        if name in now:
            pair.train(lr)
            yield f"left out {name.rpartition(f'{last}.')[2]}", pair.sync(left_out(name))
    yield "last", pair.sync()


def expert_scenarios(pair: Pair) -> Iterator[tuple[str, dict[str, Any]]]:
    """Syncs of a mixture of experts."""
    experts = "model.layers.1.mlp.experts"
    stale = f"{experts}.2.down_proj.weight"
    yield "first", pair.sync()
    held = hf_state_dict(pair.model).tensors[stale].clone()
    pair.train(1e-5)
    yield "clean", pair.sync()
    yield "stale", pair.sync(replaced(stale, held))
    yield "exchanged", pair.sync(swapped(f"{experts}.1.up_proj.weight", f"{experts}.3.up_proj.weight"))
    pair.train(1e-5)
    yield "not packed again", pair.sync(mend=False)
    yield "last", pair.sync()
    yield "packing", packing_outcome()


def packing_outcome() -> dict[str, Any]:
    """The kinds of packing of this machine that were not put in order again, and those that were tried."""
    kinds = [("vec", torch.float32), ("vec", torch.bfloat16)]
    kinds += [("amx", torch.bfloat16)] if torch.cpu._is_amx_tile_supported() else []
    wrong = []
    for kind, dtype in kinds:
        weight = torch.randn(96, 64).to(dtype)
        kept = packed(weight, kind)
        if torch.equal(kept, weight) or not torch.equal(unpacked(kept, kind), weight):
            wrong.append(f"{kind} {dtype}")
    return {"names": wrong, "text": str(kinds)}


def adapter_scenarios(pair: Pair) -> Iterator[tuple[str, dict[str, Any]]]:
    """Syncs of an adapter alone, after one of the weights."""
    from vllm.lora.request import LoRARequest

    pair.model = LoRA(rank=RANK).apply(pair.model, causal_lm=True)
    pair.prover = pair.new_prover(pair.dtype)
    directory = Path(tempfile.mkdtemp())

    def written(version: int) -> LoRARequest:
        pair.model.save_pretrained(directory / str(version))
        return LoRARequest(f"v{version}", version, str(directory / str(version)))

    def sync(request: Any, *, weights: bool = False, note: bool = True) -> dict[str, Any]:
        question = pair.prover.question(weights=weights, adapter_rank=RANK)
        if weights:
            held = pair.model.get_base_model().state_dict()
            for name, x in held.items():
                if "lora_" not in name:
                    pair.prover.add_fingerprint(plain_name(name), x)
        if note:
            pair.prover.add_adapter_fingerprints(live_tensors(pair.model))
        return pair.prove(lambda: answer_request(pair.llm, question, request))

    yield "first", sync(written(1), weights=True)
    pair.train(lr=1e-3)
    yield "stale", sync(LoRARequest("v1", 1, str(directory / "1")))
    second = written(2)
    yield "clean", sync(second)
    pair.train(lr=1e-3)
    yield "not asked for", sync(None)
    yield "binds half", sync(unbound(written(3), only="q_proj"))
    yield "last", sync(written(4))


def unbound(request: Any, only: str) -> Any:
    """The adapter with names of layers that the model does not have."""
    from safetensors.torch import load_file, save_file

    file = Path(request.lora_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({(n.replace(".layers.", ".layers.7") if only in n else n): x for n, x in tensors.items()}, file)
    return request


SCENARIOS = {"weights": weight_scenarios, "experts": expert_scenarios, "adapter": adapter_scenarios}


def outcomes(path: str, dtype: str, kind: str) -> dict[str, Any]:
    """Every scenario with an engine of its own."""
    torch.manual_seed(0)
    options = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if kind == "adapter" else {}
    pair = Pair(path, dtype, **options)
    try:
        return dict(SCENARIOS[kind](pair))
    finally:
        pair.close()


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):
        from verl.rollout.vllm.server import engine_server  # noqa: F401 - all of vLLM

        gc.freeze()  # what was imported is not garbage of the engine
        found = {argument: outcomes(*argument.split(":")) for argument in sys.argv[1:]}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds


if __name__ == "__main__":
    main()
