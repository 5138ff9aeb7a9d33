"""The trainer's log-probs of the rows of `verl.rollout.proof`; processes of a sharded model compute them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.models.parallel_info import Autocast, compute_device, computing_in, release_gathered, through_stages
from verl.ops.logprobs import log_probs_of, response_positions
from verl.rollout.proof.fingerprints import as_array


@torch.no_grad()
def trainer_log_probs(model: Any, rows: tuple[tuple[int, ...], ...], autocast: Autocast = None) -> np.ndarray:
    """Log-probs [rows, length - 1] of each token but the first, from the training model."""
    tokens = torch.tensor(rows, device=compute_device(model))
    following = tokens[:, 1:]

    def log_probs() -> torch.Tensor:
        with computing_in(autocast, model):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        return log_probs_of(response_positions(logits, following.shape[1]), following)

    computed = through_stages(model, tokens, log_probs)
    release_gathered(model)
    return as_array(computed)
