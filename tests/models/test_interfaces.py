"""Any Hugging Face model fits its role; what does not is told by what it lacks."""

from types import SimpleNamespace

import pytest
import torch
from random_models import save_random_classifier
from refusals import refused

from verl.models.interfaces import as_critic, as_reward_model, check_interface
from verl.models.pretrained import Pretrained

IDS = torch.tensor([[3, 4, 5, 6]])
ASKED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


class Own(torch.nn.Module):
    """A module of the user's own, whose answer a test chooses."""

    def __init__(self, **answer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.answer = answer

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(**{name: make(input_ids) for name, make in self.answer.items()})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    path = save_random_classifier(tmp_path_factory.mktemp("classifier"), "qwen2")
    return Pretrained(path=str(path)).load_classifier("cpu")


def test_models_of_hugging_face_fit_their_roles(model32, classifier):
    actor = model32.load_causal_lm("cpu").train()
    check_interface("actor", actor)
    assert all(module.training for module in actor.modules())
    reward = as_reward_model(classifier)
    assert reward(**ASKED).scores.shape == (1,)
    assert as_critic(actor)(**ASKED).values.shape == (1, 4)
    assert as_critic(model32.load_backbone("cpu"))(**ASKED).values.shape == (1, 4)


def test_a_module_that_answers_as_its_role_asks_is_taken_as_it_is():
    reward = Own(scores=lambda ids: ids.float().sum(1))
    critic = Own(values=lambda ids: ids.float())
    assert as_reward_model(reward) is reward
    assert as_critic(critic) is critic


def several_labels(tmp_path):
    return Pretrained(path=str(save_random_classifier(tmp_path, "qwen2", num_labels=3))).load_classifier("cpu")


test_what_is_missing_is_told = refused(
    ("reward_model", "scores", lambda model32: as_reward_model(model32.load_causal_lm("cpu"))),
    ("actor", "generate", lambda classifier: check_interface("actor", classifier)),
    ("critic_model", "values", lambda: as_critic(Own(values=lambda ids: ids.float().sum(1)))),
    ("reward_model", "str", lambda: as_reward_model("not a model")),
    ("critic_model", "input_ids", lambda: as_critic(torch.nn.Linear(2, 2))),
    ("reward_model", None, lambda tmp_path: as_reward_model(several_labels(tmp_path))),
)


def test_a_classifier_of_several_labels_needs_the_choice_of_one(tmp_path):
    assert as_reward_model(several_labels(tmp_path), label=2)(**ASKED).scores.shape == (1,)
