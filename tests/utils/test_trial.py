"""Templates and regular expressions of others that never end, or double their memory, are refused in a sentence."""

from __future__ import annotations

import json
import shutil

import pytest
from refusals import refusal

from verl.data.chat_template import ChatTemplate
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.utils.child_process import trial
from verl.utils.child_process.trial import pattern_fault, template_fault

RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
TAGGED = f"{{% generation %}}{DOUBLING}{{%- endgeneration -%}}"
SOUND = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}{{ [1, 2] | tojson }}"


@pytest.mark.parametrize(
    ("template", "said"), [(RANGES, "did not end"), pytest.param(TAGGED, "GiB of memory", marks=pytest.mark.exhaustive)]
)
def test_a_chat_template_without_end_is_refused_within_seconds(template, said, monkeypatch):
    if said == "did not end":
        monkeypatch.setattr(trial, "PROCESSOR_S", 1)
    chat = ChatTemplate(character_tokenizer(), template)
    with refusal("chat_template") as caught:
        chat.render([{"role": "user", "content": "1+2="}], "row 1", reply_follows=True)
    assert said in str(caught.value)


def test_a_sound_template_is_tried_once_and_rendered():
    chat = ChatTemplate(character_tokenizer(), SOUND)
    messages = [{"role": "user", "content": " 1+2= "}]
    assert chat.render(messages, "row 1", reply_follows=True) == "<|user|>1+2=[1, 2]"
    assert template_fault("{{ raise_exception('no') }}{{ nothing.at.all }}", {"messages": messages}) is None


def test_an_adapter_whose_regular_expression_does_not_end_is_refused(model32, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "PROCESSOR_S", 1)
    adapted = LoRA(rank=2).apply(model32.load_causal_lm("cpu"), causal_lm=True)
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    config = {**json.loads(file.read_text()), "base_model_name_or_path": model32.path}
    file.write_text(json.dumps({**config, "target_modules": r".*\.(q_proj|v_proj)"}))
    assert Pretrained(path=str(tmp_path / "adapter")).adapter() is not None
    file.write_text(json.dumps({**config, "target_modules": "(a+|[a-z.]+)+!"}))
    with refusal("path") as caught:
        Pretrained(path=str(tmp_path / "adapter")).load_causal_lm("cpu")
    assert "regular expression" in str(caught.value)
    shutil.rmtree(tmp_path / "adapter")
    assert pattern_fault([r".*\.(q_proj|v_proj)", "("], ["model.layers.0.q_proj"]) is None
