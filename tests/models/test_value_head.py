"""The value head: zero at the start, one number per position, and saved beside a backbone that anyone can open."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from random_models import save_random_model
from refusals import refusal
from roles import largest_difference, start_critic, weights
from safetensors.torch import load_file, save_file
from same_training import course, digest, newest
from torch import Tensor
from trainer.runs import PPO_ALGORITHM, fit
from transformers import AutoModel

from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.models.heads import ModelHead, ScoreHeadModel, ValueHeadModel, ValueHeadOutput, head_of
from verl.models.lora import LoRA
from verl.models.pretrained import VALUE_HEAD_FILE, Pretrained
from verl.workers.critic import Critic
from verl.workers.load_state import CheckpointSelection, load_weights

TOKENS = torch.tensor([[0, 0, 8, 9, 10], [11, 12, 13, 14, 15]])
MASK = (TOKENS > 0).long()
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp_min(0)


@pytest.fixture
def trained(model64):
    """A value model whose head is not zero."""
    model = ValueHeadModel(model64.load_backbone("cpu"))
    generator = torch.Generator().manual_seed(0)
    for weight in model.head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def test_values_are_the_head_on_the_last_hidden_state(trained):
    hidden = trained.backbone(TOKENS, attention_mask=MASK, position_ids=POSITIONS).last_hidden_state
    expected = hidden @ trained.head.weight[0] + trained.head.bias
    torch.testing.assert_close(trained(TOKENS, MASK, POSITIONS).values, expected, rtol=0, atol=1e-12)


def test_transformers_opens_the_directory_of_a_critic(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    assert (tmp_path / VALUE_HEAD_FILE).is_file()
    opened = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert largest_difference(weights(opened), weights(trained.backbone)) == 0


@pytest.mark.parametrize("head", ["score", "v_head.summary", "value_head"])
def test_a_critic_begins_with_the_head_of_a_reward_model_or_of_a_critic_of_another_library(head, tmp_path):
    file = save_random_model(tmp_path / "m", "llama", torch.float32) / "model.safetensors"
    weight, bias = torch.randn(1, 32), torch.ones(1)
    save_file(load_file(file) | {f"{head}.weight": weight, f"{head}.bias": bias}, file, metadata={"format": "pt"})
    critic: Any = start_critic(Pretrained(path=str(tmp_path / "m"))).engine.model
    assert torch.equal(critic.head.weight, weight)
    assert torch.equal(critic.head.bias, bias)
    with refusal(str(tmp_path / "m"), varies=True):
        save_file(load_file(file) | {"score.weight": torch.zeros(2, 32)}, file)
        ScoreHeadModel(critic.backbone).load(tmp_path / "m")


def test_the_head_of_a_bfloat16_backbone_is_float32(dir32):
    model = ValueHeadModel(Pretrained(path=str(dir32), dtype="bfloat16").load_backbone("cpu"))
    assert model.head.weight.dtype == model(TOKENS, MASK, POSITIONS).values.dtype == torch.float32


class TwoLayers(ModelHead):
    """Another head than the package has: layers of its own, in a file of its own."""

    file = "two_layers.safetensors"

    def __init__(self, backbone: Any):
        super().__init__(backbone)
        width = backbone.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(width, 4), torch.nn.Linear(4, 1)
        for weight in [*self.inner.parameters(), *self.outer.parameters()]:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)

    def forward(self, input_ids: Tensor, probe: bool = False, **others: Any) -> ValueHeadOutput:
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **others).last_hidden_state
        return ValueHeadOutput(values=self.outer(self.inner(hidden).tanh()).squeeze(-1))


@dataclass(frozen=True, kw_only=True)
class DeepCritic(Critic):
    head: ClassVar[type[ModelHead]] = TwoLayers


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, pytest.param(LoRA(rank=2), marks=pytest.mark.exhaustive)], ids=["whole", "adapter"]
)
def test_another_head_is_trained_saved_resumed_and_loaded_with_no_further_edit(model32, tmp_path, lora):
    critic = DeepCritic(model=model32, optimizer=AdamW(lr=3e-3), micro_batch_tokens=4096, lora=lora)
    parts: dict[str, Any] = {"algorithm": PPO_ALGORITHM, "critic": critic, "save_final": True}
    fit(course(model32, tmp_path / "whole", **parts), tmp_path / "whole")
    stopped = tmp_path / "stopped"
    fit(course(model32, stopped, stop_after=2, **parts), stopped)
    fit(course(model32, stopped, resume="latest", **parts), stopped)
    assert digest(stopped) == digest(tmp_path / "whole")
    saved = newest(stopped).directory / "critic"
    assert (saved / TwoLayers.file).read_bytes() == (stopped / "critic" / TwoLayers.file).read_bytes()
    model: Any = TwoLayers(model32.load_backbone("cpu"))
    if lora is not None:
        model.backbone = lora.apply(model.backbone, causal_lm=False)
    before = model.outer.weight.clone()
    load_weights(model, "critic", CheckpointSelection(saved.parent), Parallelism())
    assert not torch.equal(model.outer.weight, before)
    assert torch.equal(model.outer.weight, load_file(saved / TwoLayers.file)["outer.weight"])
    head_of(model).save(tmp_path)
    assert (tmp_path / TwoLayers.file).read_bytes() == (saved / TwoLayers.file).read_bytes()


def test_the_head_of_another_model_is_refused(trained, tmp_path):
    other = TwoLayers(trained.backbone)
    other.save(tmp_path)
    (tmp_path / TwoLayers.file).rename(tmp_path / trained.file)
    with refusal(str(tmp_path / trained.file)):
        trained.load(tmp_path)
