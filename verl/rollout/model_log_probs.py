"""Log-probs by the model that trains: of the fixed rows of a proof, and of responses whose engine gives none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.models.parallel_info import (
    Autocast,
    compute_device,
    computing_in,
    release_gathered,
    through_stages,
    weights_gathered,
)
from verl.ops.batching import micro_batches
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.proof.fingerprints import as_array

MICRO_BATCH_TOKENS = 16384  # of a forward pass


@torch.no_grad()
def trainer_log_probs(model: Any, rows: tuple[tuple[int, ...], ...], autocast: Autocast = None) -> np.ndarray:
    """Log-probs [rows, length - 1] of each token but the first of the rows of `verl.rollout.proof`. Processes of a
    sharded model compute them together."""
    tokens = torch.tensor(rows, device=compute_device(model))
    following = tokens[:, 1:]

    def log_probs() -> Tensor:
        with computing_in(autocast, model):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        return log_probs_of(response_positions(logits, following.shape[1]), following)

    computed = through_stages(model, tokens, log_probs)
    release_gathered(model)
    return as_array(computed)


@torch.no_grad()
def response_log_probs(model: Any, rows: DataProto, temperature: float, autocast: Autocast = None) -> Tensor:
    """Log-probs [B T] of responses, in passes of rows with similar lengths; 0 off `response_mask`. Collective over the
    processes that hold the model."""
    model.eval()
    device, log_probs = compute_device(model), torch.zeros_like(rows["rollout_log_probs"])
    lengths = rows["attention_mask"].sum(dim=1).tolist()
    with weights_gathered(model):  # processes may have different numbers of passes
        for part in micro_batches(lengths, max(MICRO_BATCH_TOKENS, max(lengths, default=1))):
            inputs = {x: rows[x][part].to(device) for x in ("input_ids", "attention_mask", "position_ids")}
            responses = rows["responses"][part].to(device)
            with computing_in(autocast, model):
                logits = response_positions(model(**inputs, use_cache=False).logits, responses.shape[1])
            log_probs[part] = log_probs_of(logits, responses, temperature).to(log_probs)
    release_gathered(model)
    return log_probs.masked_fill_(~rows["response_mask"], 0.0)
