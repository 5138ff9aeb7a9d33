"""Run by test_families.py: many vLLM engines one after another in one process, since importing vLLM takes seconds.

    python tests/rollout/vllm/vllm_engines_in_one_process.py DIRECTORY CASE ...

Prints one JSON object: for each case the share of rows with the same tokens as our own loop and the largest difference
of log-probs, or the error. Weights go through the stream that they go through between two processes.
"""

import dataclasses
import functools
import gc
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from image_models import save_image_model
from model_paths.test_images import batch_of, prompts_of
from rollout.engines import agreement, generate, plain_log_probs, random_prompts, save_family, shake

from verl.errors import WeightSyncError
from verl.model_paths.images import row_media
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.ops.sampling import NO_TURN
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, TurnEngine, TurnRequest, TurnResult
from verl.rollout.engine_process.messages import TurnOutput
from verl.rollout.engine_process.process import EngineError
from verl.rollout.hf import HFRollout
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof.fingerprints import ProbeVectors
from verl.rollout.proof.probe import probe_rows
from verl.rollout.proof.verifier import SyncVerifier, VerifyRequest
from verl.rollout.rows import assemble_turns, prompt_tokens
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import as_config_error, engine_args, write_model_directory
from verl.rollout.weight_sync.state_dict import weights_of
from verl.rollout.weight_sync.stream import Feed, StreamWriter, plan_chunks

ROOMS = {"no room": 0.0001, "little room": 0.0002, "room": 0.0004}  # of the cache, in GiB
OPTIONS = VLLMRollout(max_new_tokens=10, kv_cache_gib=0.05, max_num_seqs=16, max_num_batched_tokens=128)


def engine_of(model: Any, directory: Path, options: VLLMRollout = OPTIONS) -> Any:
    """The engine that the child would have for a model, in this process."""
    from verl.rollout.vllm.server.engine_server import EngineServer

    directory.mkdir()
    setting = engine_args(options, model, None, write_model_directory(model, directory))
    try:
        return EngineServer(setting)
    except Exception as error:
        raise as_config_error(EngineError(f"{type(error).__name__}: {error}", ""), setting, model) from error


def load(engine: Any, model: Any) -> str | None:
    """Send the weights from a thread, as another process would; gives why the engine loaded its model anew."""
    weights = list(weights_of(model))
    chunks, chunk_bytes = plan_chunks({w.name: w.shape for w in weights}, model.dtype, 100_000)
    stream = StreamWriter(chunk_bytes, 1, model.device)
    stream.begin()
    filling = (chunks, ((weight.name, weight.make()) for weight in weights), model.dtype, lambda: True)
    sender = threading.Thread(target=stream.fill, args=filling, daemon=True)
    sender.start()
    engine.connect([Feed(readers=(0,), chunks=chunks, handle=stream.handle)], model.dtype)
    _, anew = engine.load(1, True)
    sender.join()
    stream.close()
    return anew


def compared(engine: Any, model: Any, tokenizer: Any, prompts: DataProto) -> tuple[float, float]:
    """Same tokens, and gap of log-probs, of an engine and our own loop."""
    ours = HFRollout(max_new_tokens=10).attach(model, tokenizer, 0)
    engine.begin_turns(TokenSampler.of(OPTIONS, 0, ours.stop_ids.tolist()), 10, None)
    columns = prompt_tokens(prompts), prompts["prompt_ids"].tolist(), row_media(prompts)
    turns = [
        TurnRequest(4 * place + sample, tokens, number, sample, NO_TURN, 10, step=1, media_key=key, media=media)
        for place, (tokens, number, (key, media)) in enumerate(zip(*columns, strict=True))
        for sample in range(4)
    ]
    made = engine.advance_turns(turns, 600.0, True)
    engine.end_turns()
    ordered = sorted(zip(made.episodes, made.tokens, made.log_probs, strict=True))
    drawn = [TurnResult(number, tokens, log_probs, True) for number, tokens, log_probs in ordered]
    found = assemble_turns(prompts, drawn, TurnEngine(), 0, 4)
    return agreement(found, generate(ours, prompts, GenerationRequest(1, 4)))


def family(name: str, directory: Path, lora: LoRA | None = None) -> dict[str, Any]:
    """Before and after every weight has changed."""
    source = save_family(directory / "model", name)
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    if lora is not None:
        model = lora.apply(model, causal_lm=True).eval()
    engine = engine_of(model, directory / "engine")
    found = []
    for seed in range(2):
        shake(model, 0.05 if lora else 0.02, seed)
        anew = load(engine, model)
        found.append(compared(engine, model, tokenizer, random_prompts(8)))
    return {"same": [same for same, _ in found], "gap": [gap for _, gap in found], "anew": anew}


def images(family_name: str, directory: Path) -> dict[str, Any]:
    """Prompts of equal tokens and other images, several images, and none, together and each alone, before and after
    weights of the vision tower alone have changed; and the tensors that are found to differ before they are sent."""
    source = Pretrained(path=str(save_image_model(directory / "model", family_name, 32)), images=True, freeze=())
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    engine = engine_of(model, directory / "engine")
    prompts = batch_of(tokenizer, prompts_of(family_name))
    tower = [p for name, p in model.named_parameters() if "vision" in name or "visual" in name]
    found, faults, loaded = [], [], []
    for _ in range(2):
        loaded.append(load(engine, model))
        faults.append(differing_tensors(engine, model))
        found.append(compared(engine, model, tokenizer, prompts))
        found += [compared(engine, model, tokenizer, prompts[i : i + 1]) for i in range(len(prompts))]
        with torch.no_grad():
            for parameter in tower:
                parameter.add_(0.02 * torch.randn(parameter.shape))
        faults.append(differing_tensors(engine, model))
    same, gap = zip(*found, strict=True)
    return {"same": same, "gap": gap, "anew": next(filter(None, loaded), None), "faults": faults, "tower": len(tower)}


def differing_tensors(engine: Any, model: Any) -> list[str]:
    """Names of the tensors that a proof of the engine finds not to be those of the model."""
    rows = probe_rows(model.config.get_text_config().vocab_size)
    verifier = SyncVerifier(model, model.dtype, rows, functools.partial(trainer_log_probs, model))
    question = verifier.question()
    for weight in weights_of(model):
        verifier.add_fingerprint(weight.name, weight.make())
    try:
        verifier.verify(engine.prove(question))
    except WeightSyncError as error:
        return list(error.names)
    return []


def refused(options: VLLMRollout, directory: Path, **changes: Any) -> dict[str, Any]:
    """What is said of an engine that cannot be."""
    model = save_family(directory / "model", "qwen2").load_causal_lm("cpu")
    for name, value in changes.items():
        setattr(model.config, name, value)
    if changes:  # an architecture that vLLM has never heard of
        type(model).__name__ = "StrangeForCausalLM"
    try:
        engine_of(model, directory / "engine", options)
    except Exception as error:  # noqa: BLE001 - told to the test
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if changes:
            type(model).__name__ = "Qwen2ForCausalLM"
    return {"error": None}


def prefix_versions(directory: Path) -> dict[str, Any]:
    """Tokens that come from the prefix cache, of prompts that were read and drawn before and after three changes of the
    weights, while two rows go on."""
    model = save_family(directory / "model", "qwen2").load_causal_lm("cpu")
    engine, numbers = engine_of(model, directory / "engine"), itertools.count()
    sampler, question = TokenSampler.of(OPTIONS, 0, []), VerifyRequest(ProbeVectors(), ())
    short, long = [3 + i % 80 for i in range(120)], [4 + i % 80 for i in range(150)]  # than a block

    def begin(tokens: list[int], limit: int) -> TurnOutput:
        """One step with a further row."""
        turn = TurnRequest(next(numbers), tokens, 0, 0, NO_TURN, limit, step=1)
        return engine.advance_turns([turn], 0.0, False)

    def renew(seed: int) -> None:
        before = engine.open_turns().tokens
        shake(model, 0.1, seed)
        load(engine, model)
        assert engine.prove(question).log_probs.size == 0
        assert engine.open_turns().tokens == before != []

    def finished(tokens: list[int]) -> tuple[int, float]:
        """Tokens from the cache, and the gap of log-probs from those of a plain forward pass."""
        made = begin(tokens, 2)
        while not made.episodes:
            made = engine.advance_turns([], 0.0, False)
        with torch.no_grad():
            logits = model(torch.tensor([tokens + made.tokens[0]])).logits[0, -3:-1]
        plain = logits.log_softmax(-1).gather(-1, torch.tensor(made.tokens[0])[:, None])[:, 0]
        return made.cached_tokens, float((plain - torch.tensor(made.log_probs[0])).abs().max())

    load(engine, model)
    engine.begin_turns(sampler, 100, None, True)
    for tokens in (short, long):
        begin(tokens, 100)
    found = []
    for seed in range(1, 4):
        renew(seed)
        for _ in range(6):  # the block of `short` is filled under the second weights
            engine.advance_turns([], 0.0, False)
        mixed = [*short, *engine.open_turns().tokens[0], 5, 6]
        found += [[finished(mixed), finished(long), finished(long)]]
    return {"found": found}


def reloaded_in_flight(directory: Path) -> dict[str, Any]:
    """A model that vLLM loads itself, in the middle of a response: tensors that are proven, and the largest distance of
    log-probs from those of transformers with keys that are kept."""
    model = save_family(directory / "model", "qwen3_moe").load_causal_lm("cpu")
    engine = engine_of(model, directory / "engine")
    anew = load(engine, model)
    states = [{name: x.clone() for name, x in model.state_dict().items()}]
    engine.begin_turns(TokenSampler.of(OPTIONS, 0, []), 20, None, True)
    tokens = [3 + i % 80 for i in range(40)]
    new = [TurnRequest(0, tokens, 0, 0, NO_TURN, 20, step=1)]
    for _ in range(5):
        engine.advance_turns(new, 0.0, False)
        new = []
    shake(model, 0.05, 1)
    states.append({name: x.clone() for name, x in model.state_dict().items()})
    load(engine, model)
    reply = engine.prove(VerifyRequest(ProbeVectors(), ()))
    made = engine.advance_turns([], 600.0, True)
    row, versions = tokens + made.tokens[0], [0] * 5 + [1] * 15
    plain = plain_log_probs(model, lambda v: model.load_state_dict(states[v]), row, len(tokens), versions, keeps=True)
    gap = float((plain - torch.tensor(made.log_probs[0])).abs().max())
    return {"anew": anew, "unproven": reply.unproven, "proven": len(reply.fingerprints), "gap": gap}


def preemptions(directory: Path, kv_cache: Any) -> dict[str, int]:
    """How often vLLM preempts one of six rows in a cache that holds three."""
    model = save_family(directory / "model", "qwen2").load_causal_lm("cpu")
    options = dataclasses.replace(OPTIONS, kv_cache_gib=0.0012, kv_cache=kv_cache)
    engine = engine_of(model, directory / "engine", options)
    load(engine, model)
    scheduler, calls = engine.llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **more: (calls.append(1), preempt(*args, **more))
    engine.begin_turns(TokenSampler.of(OPTIONS, 0, []), 200, None, True)
    prompts = [[3 + row, *range(3, 52)] for row in range(6)]
    turns = [TurnRequest(row, tokens, row, 0, NO_TURN, 200, step=1) for row, tokens in enumerate(prompts)]
    made = engine.advance_turns(turns, 600.0, True)
    assert sorted(made.episodes) == list(range(6))
    del scheduler._preempt_request  # a reference to itself, with which it would outlive this
    return {"preemptions": len(calls)}


def case(name: str, directory: Path) -> dict[str, Any]:
    """One case by its name, in a new directory."""
    directory.mkdir()
    if name == "lora":
        return family("qwen2", directory, LoRA(rank=4, alpha=8.0))
    if name == "versions":
        return prefix_versions(directory)
    if name == "reloaded":
        return reloaded_in_flight(directory)
    if name in ("keep", "recompute"):
        return preemptions(directory, name)
    if name == "strange":
        return refused(OPTIONS, directory, model_type="strange")
    if name.startswith("images "):
        return images(name.removeprefix("images "), directory)
    if name in ROOMS:
        return refused(dataclasses.replace(OPTIONS, kv_cache_gib=ROOMS[name]), directory)
    return family(name, directory)


def main() -> None:
    from verl.rollout.vllm.server import engine_server  # noqa: F401 - all of vLLM

    gc.freeze()  # vLLM collects garbage at each end of an engine: not among all that was imported
    torch.set_num_threads(1)
    found = {}
    for number, name in enumerate(sys.argv[2:]):
        try:
            found[name] = case(name, Path(sys.argv[1]) / str(number))
        except Exception as error:  # noqa: BLE001 - told to the test
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds


if __name__ == "__main__":
    main()
