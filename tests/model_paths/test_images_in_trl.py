"""The loss and the gradients of GRPO on rows with images are those of TRL for the same rows and weights."""

import contextlib
import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_models import save_image_model
from model_paths.test_images import batch_of, plain_model, prompts_of, sampled, source
from roles import gradients, largest_difference, start_actor

from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import NoKL
from verl.algorithms.losses import PPOClip
from verl.protocol import DataProto
from verl.rollout.hf import HFRollout


def trl_trainer(model: Any) -> Any:
    """TRL's trainer without its data, its rewards and its loop: what its loss reads."""
    trl = pytest.importorskip("trl")
    fused: Any = importlib.import_module("trl.trainer.utils")
    fused.add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "entropy"))
    trainer = object.__new__(trl.GRPOTrainer)
    chosen = {"loss_type": "grpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "temperature": 1.0}
    chosen |= {"importance_sampling_level": "token", "top_entropy_quantile": 1.0, "aux_loss_enabled": False}
    chosen |= {"off_policy_mask_threshold": None, "use_vllm": False, "current_gradient_accumulation_steps": 1}
    chosen |= {"model": model, "args": SimpleNamespace(delta=None), "_metrics": defaultdict(lambda: defaultdict(list))}
    alone: dict[str, Any] = {"sync_gradients": True, "gather_for_metrics": lambda x: x}
    alone |= {
        "is_main_process": False,
        "gather": lambda x: x,
        "reduce": lambda x, reduction: x,
        "autocast": contextlib.nullcontext,
        "num_processes": 1,
    }
    chosen |= {"accelerator": SimpleNamespace(**alone), "model_kwarg_keys": {"logits_to_keep"}}
    chosen |= {"_entropy_bonus_enabled": False, "use_adaptive_entropy": False, "is_fsdp_enabled": False}
    vars(trainer).update(chosen)
    return trainer


@pytest.mark.slow
def test_a_step_of_grpo_on_images_has_the_loss_and_the_gradients_of_trl(tmp_path):
    path = save_image_model(tmp_path / "model", "qwen2_5_vl")
    algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip(), kl=NoKL(), aggregation="seq-mean-token-mean")
    actor = start_actor(source(path), HFRollout(max_new_tokens=9), algorithm)
    rows = sampled(actor, batch_of(actor.tokenizer, prompts_of("qwen2_5_vl")[:3]), 2)
    has_stray = (rows["responses"] == actor.model.config.image_token_id).any(dim=1)
    rows = rows[(~has_stray).nonzero()[:, 0].tolist()]
    scores = torch.linspace(-1, 2, len(rows), dtype=torch.float64)
    advantages = scores[:, None] * rows["response_mask"]
    rows = rows.union(DataProto.from_dict({"advantages": advantages, "returns": advantages}))
    actor.engine.forward_backward(rows, actor.micro_batch_loss)
    assert actor.engine._shares is not None
    loss = float(actor.engine._shares["loss"])

    model = plain_model(path).train()
    width = rows["prompts"].shape[1]
    media = [{k.removeprefix("media."): x[row] for k, x in rows.ragged.items()} for row in range(len(rows))]
    inputs = {
        "prompt_ids": rows["prompts"],
        "prompt_mask": rows["prompt_mask"].long(),
        "completion_ids": rows["responses"],
        "completion_mask": rows["response_mask"].long(),
        "advantages": scores,
        "num_images": [len(x["image_grid_thw"]) for x in media],
        "mm_token_type_ids": (rows["input_ids"] == model.config.image_token_id).int(),
        **{name: torch.cat([x[name] for x in media]) for name in media[0]},
    }
    expected = trl_trainer(model)._compute_loss(model, inputs)
    expected.backward()
    assert width > 20
    assert loss == pytest.approx(float(expected), abs=1e-9)
    found, theirs = gradients(actor.model), gradients(model)
    largest = max(float(x.abs().max()) for x in theirs.values())
    assert largest > 1e-3
    assert largest_difference(found, {name: theirs[name] for name in found}) < 1e-6 * largest
