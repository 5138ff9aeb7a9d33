"""The engine's side of a proof: runs in the process of the vLLM engine, and from there in that of each of its ranks."""

from __future__ import annotations

import time
from typing import Any

from verl.sync.adapters import adapter_shards
from verl.sync.engine_layers import LayerReader
from verl.sync.probe import engine_log_probs
from verl.sync.questions import Answer, Question
from verl.sync.shards import Shard, join


def answer(llm: Any, question: Question, lora_request: Any = None, rpc: str | None = None) -> Answer:
    """What a `vllm.LLM` holds; call it when new weights are loaded.

    Args:
        lora_request: that generation uses, where an adapter is to be proven.
        rpc: name of a method of the engine's workers that calls `rank_shards`, for engines that take no functions.
    """
    began = time.perf_counter()
    log_probs = engine_log_probs(llm, question.rows, lora_request)  # first, since it also puts the adapter to use
    adapter_id = lora_request.lora_int_id if lora_request is not None else None
    ranks = llm.collective_rpc(rpc or rank_shards, args=(question, adapter_id))
    marks = join([shards for shards, _ in ranks])
    unproven = tuple(dict.fromkeys(name for _, names in ranks for name in names))
    return Answer(marks, log_probs, unproven, time.perf_counter() - began)


def rank_shards(worker: Any, question: Question, adapter_id: int | None) -> tuple[dict[str, Shard], list[str]]:
    """One rank's shards, and the beginnings of the names that it cannot read. `worker` is vLLM's."""
    runner = worker.model_runner
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    shards: dict[str, Shard] = {}
    unproven: list[str] = []
    if question.weights:
        shards, unproven = LayerReader(model, question.vectors, runner.model_config.dtype).shards()
    if question.adapter_rank is not None and adapter_id is not None:
        manager = runner.lora_manager._adapter_manager
        shards |= adapter_shards(manager, adapter_id, question.adapter_rank, question.vectors)
    return shards, unproven
