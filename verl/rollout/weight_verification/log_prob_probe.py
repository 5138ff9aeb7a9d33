"""Log-probs of a few fixed rows on both sides of a sync, the proof of all that fingerprints of tensors do not cover:
rotary positions, scales, connections of layers, experts in kernels that cannot be read, an adapter that requests do not
use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.models.parallel_info import Autocast, compute_device, computing_in, release_gathered, through_stages
from verl.ops.logprobs import log_probs_of, response_positions
from verl.ops.sampling import uniform
from verl.rollout.weight_verification.fingerprint import as_array

ROWS, LENGTH = 1, 16  # one forward pass over few tokens: its cost is that of reading the weights once
_ROW_SEED = 0x9A7E
# Mean distance that rounding may make: about 100 times the type's rounding error, which a model of many layers adds up,
# but at least 1e-3. docs/rollout.md has the derivation.
ALLOWED_NATS = {"float32": 1e-3, "tf32": 5e-2, "float16": 5e-2, "bfloat16": 3e-1}


def allowed_nats(*types: str) -> float:
    """The limit for two compute types, as named by `compute_type`: that of the coarser one."""
    return max(ALLOWED_NATS.get(name, ALLOWED_NATS["float32"]) for name in types)


def probe_rows(vocab_size: int, context: int = 4096) -> tuple[tuple[int, ...], ...]:
    """Rows of tokens that are the same on every machine, of length `LENGTH` or less in a shorter context."""
    length = max(2, min(LENGTH, context - 1))
    noise = uniform(_ROW_SEED, 0, torch.arange(ROWS)[:, None], torch.tensor(0), torch.arange(length))
    return tuple(tuple(row) for row in (noise * vocab_size).long().tolist())


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


def engine_log_probs(llm: Any, rows: tuple[tuple[int, ...], ...], lora_request: Any = None) -> np.ndarray:
    """The same log-probs from a vLLM engine, in its process."""
    sampling_params = type(llm.get_default_sampling_params())  # so that nothing here has to import vLLM
    outputs = llm.generate(
        [{"prompt_token_ids": list(row)} for row in rows],
        sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
        lora_request=lora_request,
    )
    return np.array([[at[t].logprob for t, at in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])] for o in outputs])
