"""Log-probs of drawn tokens are compared with a plain forward pass of their rows before anything is trained on them."""

from typing import Any

import pytest
import torch
from random_models import save_random_model
from roles import gap_from_plain_rows, start_actor
from transformers import Qwen2ForCausalLM

from verl.component import component
from verl.model_paths.families import FamilyRecord, family_table
from verl.models.pretrained import Pretrained
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

LLAMA4 = {
    "intermediate_size_mlp": 32,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_local_experts": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 24,
    "floor_scale": 8,
    "attn_scale": 1.0,
    "use_qk_norm": False,
    "initializer_range": 0.3,
}
TEXTS = ("1+2=", "what is 6*7? what is 6*7? what is 6*7? what is 6*7? ")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "drawn again" in record.message]


@pytest.mark.slow
def test_a_model_whose_record_is_wrong_is_decoded_by_a_plainer_way(tmp_path, prompts, caplog, monkeypatch):
    wrong = FamilyRecord("padded; cache in place", layer_types=("chunked_attention",))
    monkeypatch.setitem(family_table().families, "llama4_text", (wrong,))
    path = save_random_model(tmp_path / "llama4", "llama4_text", torch.float32, **LLAMA4)
    actor = start_actor(Pretrained(path=str(path)), HFRollout(max_new_tokens=40, min_new_tokens=40))
    rows = actor.generate(prompts(*TEXTS), GenerationRequest(0, 2))
    assert gap_from_plain_rows(actor, rows, "rollout_log_probs") < 1e-4
    assert len(told(caplog)) == 1
    assert told(caplog)[0].startswith("rollout=hf draws from a Llama4ForCausalLM by decoding with a cache in place, ")


class ScaledByLength(Qwen2ForCausalLM):
    """Logits grow with the position beyond 600, which is counted in the tokens of a call, as remote code may do it."""

    def forward(self, input_ids=None, **inputs: Any):
        out = super().forward(input_ids=input_ids, **inputs)
        places = torch.arange(input_ids.shape[1])[-out.logits.shape[1] :]
        out.logits = out.logits * (1 + 2.0 * (places > 600))[:, None]
        return out


@component
class LengthUnknown(Pretrained):
    """A model with a length that no name in its configuration tells."""

    def load_causal_lm(self, device: str) -> Any:
        model = super().load_causal_lm(device)
        model.__class__ = ScaledByLength
        return model


def test_a_fault_that_only_long_rows_show_is_found_in_the_first_of_them(tmp_path, prompts, caplog):
    path = save_random_model(tmp_path / "qwen2", "qwen2", torch.float32, max_position_embeddings=1024)
    actor = start_actor(LengthUnknown(path=str(path)), HFRollout(max_new_tokens=3, min_new_tokens=3))
    rows = actor.generate(prompts(*TEXTS), GenerationRequest(0, 2))
    actor.compute_log_probs(rows)
    assert told(caplog) == []
    long = prompts("1+2=" * 20, "1+2=" * 151)
    rows = actor.generate(long, GenerationRequest(1, 2))
    assert gap_from_plain_rows(actor, rows, "rollout_log_probs") < 1e-4
    assert "decoding without a cache" in told(caplog)[-1]
    rows = rows.union(actor.compute_log_probs(rows))
    gap = (rows["old_log_probs"] - rows["rollout_log_probs"])[rows["response_mask"]].abs()
    assert float(gap.max()) < 1e-4
