"""Supervised fine-tuning as a whole: conversations, several epochs, evaluation loss, adapters."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from verl.component import BuildContext
from verl.data.files import SFTFiles
from verl.engines.optimizer import AdamW
from verl.engines.sharding import NoSharding
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.tracking.base import Trackers
from verl.trainer.config import SFTSettings
from verl.trainer.sft import SFTRun
from verl.trainer.state.training_identity import tokenizer_digest
from verl.workers.actor import Actor


def write_conversations(path, count):
    rows = []
    for index in range(count):
        user, answer = {"role": "user", "content": f"{index}+1="}, {"role": "assistant", "content": str(index + 1)}
        rows.append({"messages": [user, answer, {**user, "content": "again"}, answer]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft_run(directory, tmp_path, **actor):
    return SFTRun(
        actor=Actor(model=Pretrained(path=str(directory)), optimizer=AdamW(lr=3e-3), **actor),
        sharding=NoSharding(),
        data=SFTFiles(
            train_files=[write_conversations(tmp_path / "train.jsonl", 8)],
            eval_files=[write_conversations(tmp_path / "eval.jsonl", 4)],
            messages_key="messages",
            max_length=64,
        ),
        trainer=SFTSettings(total_epochs=6, batch_size=4, eval_before=True, eval_interval=4, num_threads=1),
        tracker=Trackers(),
    )


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["all weights", "lora"])
def test_a_model_is_saved_with_the_template_and_the_variables_that_it_learned_by(lora, dir32, tmp_path):
    template = "{% for m in messages %}{{ '?' if thinks and m.role == 'assistant' }}{{ m.content }}<system>{% endfor %}"
    template += "{{ '?' if thinks and add_generation_prompt }}"
    run = sft_run(dir32, tmp_path, lora=lora)
    data = replace(run.data, chat_template=template, chat_template_kwargs={"thinks": True})
    run = replace(run, data=data, trainer=replace(run.trainer, total_epochs=1))
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        own, before = Pretrained(path=str(dir32)).load_tokenizer(), tokenizer_digest(trainer.context.tokenizer)
        trainer.fit()
    assert before == tokenizer_digest(own)  # as before the template was saved: older checkpoints go on
    saved = Pretrained(path=str(tmp_path / "run/actor")).load_tokenizer()
    chat = [{"role": "user", "content": "1+1="}]
    texts = [x.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for x in (saved, own)]
    assert texts[0] == "1+1=<system>?" != texts[1]
    if lora is None:  # whoever generates with it stops where a turn ends
        ends = GenerationConfig.from_pretrained(tmp_path / "run/actor").eos_token_id
        assert ends == [saved.eos_token_id, saved.convert_tokens_to_ids("<system>")]


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["all weights", "lora"])
def test_conversations_are_learned_over_several_epochs_with_a_falling_evaluation_loss(lora, dir32, tmp_path):
    with sft_run(dir32, tmp_path, lora=lora).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        learned = trainer.learner.evaluate(trainer.train_data.collate([0])).result()["tokens"]
        result = trainer.fit()
        sums = trainer.learner.evaluate(trainer.eval_data.collate(range(4))).result()
        batch = trainer.eval_data.collate([3])
    assert learned == 4  # "1<eos>" twice
    assert (result.status, result.steps, result.samples) == ("finished", 12, 48)
    assert list(result.evaluations) == [0, 4, 8, 12]
    losses = [metrics["eval/loss"] for metrics in result.evaluations.values()]
    assert losses[-1] < losses[0] - 0.2
    assert losses[-1] == pytest.approx(sums["nll"] / sums["tokens"])
    assert result.evaluations[0].keys() == {"eval/loss", "eval/token_accuracy"}
    assert "update actor" in (tmp_path / "run/plan.txt").read_text()
    actor = tmp_path / "run/actor"  # which opens as a whole model, and is an adapter alone where that was trained
    assert [(actor / f"{name}.safetensors").exists() for name in ("model", "adapter_model")] == [not lora, bool(lora)]
    with torch.no_grad():
        models = (Pretrained(path=str(path)).load_causal_lm("cpu") for path in (dir32, actor))
        before, after = (float(loss_of(model, batch)) for model in models)
    assert after < before


def loss_of(model, batch):
    log_probs = model(batch["input_ids"]).logits[:, :-1].log_softmax(dim=-1)
    nll = -log_probs.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return nll[batch["loss_mask"][:, 1:]].mean()
