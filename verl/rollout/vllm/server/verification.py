"""vLLM's side of the verification of a sync: fingerprints through its layers, and log-probs of the probe.

`answer_request` runs in the vLLM process, `read_parts` in each of its workers.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm import SamplingParams

from verl.rollout.proof.fingerprints import FingerprintParts, join_parts
from verl.rollout.proof.verifier import VerifyReply, VerifyRequest
from verl.rollout.vllm.server.layer_fingerprints import LayerFingerprints, adapter_parts

READER = "_verl_layer_reader"  # in a model, kept for the next sync


def answer_request(llm: Any, question: VerifyRequest, lora_request: Any = None) -> VerifyReply:
    """Fingerprints and log-probs of a `vllm.LLM` with a `WorkerExtension`; called after new weights were loaded.

    Args:
        lora_request: used for generation, if an adapter is verified.
    """
    began, log_probs = time.perf_counter(), np.zeros(0)
    if question.rows:
        log_probs = engine_log_probs(llm, question.rows, lora_request)  # also puts the adapter to use
    adapter_id = None if lora_request is None else lora_request.lora_int_id
    ranks = llm.collective_rpc("verl_read_parts", args=(question, adapter_id))
    fingerprints = join_parts([parts for parts, _ in ranks])
    unproven = tuple(dict.fromkeys(name for _, names in ranks for name in names))
    return VerifyReply(fingerprints, log_probs, unproven, time.perf_counter() - began)


def read_parts(worker: Any, question: VerifyRequest, adapter_id: int | None) -> tuple[FingerprintParts, list[str]]:
    """The rank's parts, and the name prefixes of tensors that cannot be read."""
    runner = worker.model_runner
    parts: FingerprintParts = {}
    unproven: list[str] = []
    if question.weights:
        model = runner.get_model()
        if READER not in model.__dict__:
            names = () if worker._feed is None else worker._feed.shapes
            model.__dict__[READER] = LayerFingerprints(model, runner.model_config.dtype, names)
        reader: LayerFingerprints = model.__dict__[READER]
        parts, unproven = reader.parts(question.vectors), reader.unproven
    if question.adapter_rank is not None and adapter_id is not None:
        manager = runner.lora_manager._adapter_manager
        parts |= adapter_parts(manager, adapter_id, question.adapter_rank, question.vectors)
    return parts, unproven


def engine_log_probs(llm: Any, rows: tuple[tuple[int, ...], ...], lora_request: Any = None) -> np.ndarray:
    """The same log-probs from a vLLM engine, in its process."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(row)} for row in rows],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
        lora_request=lora_request,
    )
    return np.array([[at[t].logprob for t, at in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])] for o in outputs])
