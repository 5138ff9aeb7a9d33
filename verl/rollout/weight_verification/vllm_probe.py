"""The engine's side of weight verification: runs in the vLLM process, and from there in each of its workers."""

from __future__ import annotations

import time
from typing import Any

from verl.rollout.weight_verification.fingerprint import FingerprintShards, join_shards
from verl.rollout.weight_verification.logprob_probe import engine_log_probs
from verl.rollout.weight_verification.verifier import VerifyReply, VerifyRequest
from verl.rollout.weight_verification.vllm_params import LayerFingerprints, adapter_shards

READER = "_verl_layer_reader"


def answer_request(llm: Any, question: VerifyRequest, lora_request: Any = None, rpc: str | None = None) -> VerifyReply:
    """Fingerprints and log-probs of a `vllm.LLM`; called after new weights were loaded.

    Args:
        lora_request: used for generation, if an adapter is verified.
        rpc: name of a method of the engine's workers that calls `run_on_worker`, for engines that take no functions.
    """
    began = time.perf_counter()

    def on_ranks(task: str, *args: Any) -> list[Any]:
        return llm.collective_rpc(rpc or run_on_worker, args=(task, *args))

    mode = on_ranks("score", "raw_logprobs")[0]  # an engine may be set to give logits in the place of log-probs
    try:
        log_probs = engine_log_probs(llm, question.rows, lora_request)  # also puts the adapter to use
    finally:
        on_ranks("score", mode)
    ranks = on_ranks("read", question, lora_request.lora_int_id if lora_request is not None else None)
    fingerprints = join_shards([shards for shards, _ in ranks])
    unproven = tuple(dict.fromkeys(name for _, names in ranks for name in names))
    return VerifyReply(fingerprints, log_probs, unproven, time.perf_counter() - began)


def run_on_worker(worker: Any, task: str, *args: Any) -> Any:
    """Run one task in the process of a rank; `worker` is vLLM's worker."""
    return {"score": _score, "read": _read}[task](worker, *args)


def _score(worker: Any, mode: str) -> str:
    """Set the mode of prompt log-probs, and return the previous one."""
    config = worker.model_runner.model_config
    before, config.logprobs_mode = config.logprobs_mode, mode
    return before


def _reader(model: Any, dtype: Any) -> LayerFingerprints:
    """The reader of the model, cached for the next sync."""
    if READER not in model.__dict__:
        model.__dict__[READER] = LayerFingerprints(model, dtype)
    return model.__dict__[READER]


def _read(worker: Any, question: VerifyRequest, adapter_id: int | None) -> tuple[FingerprintShards, list[str]]:
    """The rank's shards, and the name prefixes of tensors that cannot be read."""
    runner = worker.model_runner
    shards: FingerprintShards = {}
    unproven: list[str] = []
    if question.weights:
        reader = _reader(runner.get_model(), runner.model_config.dtype)
        shards, unproven = reader.shards(question.vectors), reader.unproven
    if question.adapter_rank is not None and adapter_id is not None:
        manager = runner.lora_manager._adapter_manager
        shards |= adapter_shards(manager, adapter_id, question.adapter_rank, question.vectors)
    return shards, unproven
