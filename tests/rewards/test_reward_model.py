"""Rewards by a model: the score of each row is what transformers gives for that row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import each_value_once
from random_models import save_random_classifier, save_random_model, word_tokenizer
from refusals import refusal
from rewards.rated import PROMPTS, RESPONSES, built, described, rollout
from trainer.runs import ppo_run, read_lines
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError, RewardError
from verl.models.heads import RewardHeadModel, RewardHeadOutput
from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.rewards.reward_model import ModelReward, RewardModel, RewardTokenizer
from verl.rewards.rules import ExactMatch
from verl.rewards.weighted_sum import WeightedSum

DECODERS = ["qwen2", "llama", "mistral", "gemma2", "gpt_neox", "gpt2", "opt"]


@torch.no_grad()
def row_by_row(path, texts, label=0) -> list[float]:
    """The logits that transformers gives each text alone, without padding; a pair of texts is a tuple."""
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [tokenizer(*([part] for part in text), return_tensors="pt") for text in texts]
    return [float(model(**row).logits[0, label]) for row in rows]


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(("budget", "family"), each_value_once([1, 40, 4096], DECODERS))
def test_a_decoder_with_the_tokenizer_of_the_policy_reads_its_token_ids(family, budget, tmp_path):
    save_random_classifier(tmp_path, family)
    # As it is opened beside a Qwen2, the tokenizer leaves unknown characters out.
    context = BuildContext(tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    reward = described(tmp_path, family, micro_batch_tokens=budget).build(context)
    assert reward.reader.form == "tokens"
    texts = [(f"{prompt}{response}<eos>",) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = row_by_row(tmp_path, texts)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(reward.score_batch(rollout()).scores, expected, atol=1e-5)


def test_the_score_stands_on_the_last_token_of_the_response(tmp_path):
    reward, batch = built(save_random_classifier(tmp_path, "llama")), rollout()
    placed = reward.score_tokens(batch)["token_level_scores"]
    expected = reward.score_batch(batch).scores
    assert [row[mask].tolist()[-1] for row, mask in zip(placed, batch["response_mask"], strict=True)] == pytest.approx(
        list(expected)
    )
    assert (placed != 0).sum() == len(batch)
    assert len(reward.score_tokens(batch[[]])) == 0


@pytest.mark.parametrize("form", ["text", "pair"])
def test_an_encoder_with_a_tokenizer_of_its_own_reads_texts(form, tmp_path):
    save_random_classifier(tmp_path, "bert", word_tokenizer())
    reward = built(tmp_path, reads=form, micro_batch_tokens=60)
    pairs = list(zip(PROMPTS, RESPONSES, strict=True))
    expected = row_by_row(tmp_path, pairs if form == "pair" else [(prompt + text,) for prompt, text in pairs])
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(reward.score_batch(rollout()).scores, expected, atol=1e-5)
    assert built(tmp_path).reader.form == "text"


def other_characters(template: str | None):
    """The character tokenizer with one token more, and another chat template."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.chat_template = template
    return tokenizer


MARKED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"


def test_a_model_with_another_chat_template_reads_the_conversation(tmp_path):
    save_random_classifier(tmp_path, "mistral", other_characters(MARKED), max_position_embeddings=128)
    reward = built(tmp_path)
    assert reward.reader.form == "chat"
    turns = [[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}], None]
    batch = rollout(PROMPTS[:2], RESPONSES[:2], prompt_messages=turns)
    texts = ["[system]Add.\n[user]1+2=\n[assistant]3\n", "[user]what is 6*7? \n[assistant]42 is it\n"]
    expected = row_by_row(tmp_path, [(text,) for text in texts])
    np.testing.assert_allclose(reward.score_batch(batch).scores, expected, atol=1e-5)
    # As text, the messages lose the marks of the policy's template.
    expected = row_by_row(tmp_path, [("Add.\n1+2=\n3",), ("what is 6*7? 42 is it",)])
    np.testing.assert_allclose(built(tmp_path, reads="text").score_batch(batch).scores, expected, atol=1e-5)


def test_a_text_that_the_chat_template_refuses_is_named(tmp_path):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    save_random_classifier(tmp_path, "llama", other_characters(refusing))
    turns = [None, [{"role": "system", "content": "Add."}]]
    batch = rollout(PROMPTS[:2], RESPONSES[:2], prompt_messages=turns)
    with pytest.raises(RewardError, match=r"(?s)template.*roles system, assistant.*no system here.*Sample: 1"):
        built(tmp_path, reads="chat").score_batch(batch)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_padding_on_either_side_changes_no_score(family, side, tmp_path):
    path = save_random_classifier(tmp_path, family, word_tokenizer() if family == "bert" else None)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side=side)
    scored = RewardHeadModel(model)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    rows = [tokenizer(text, return_tensors="pt") for text in PROMPTS]
    with torch.no_grad():
        together = scored(batch["input_ids"], batch["attention_mask"]).scores
        alone = torch.cat([scored(row["input_ids"], row["attention_mask"]).scores for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_model_without_a_pad_token_reads_batches_and_a_pad_token_that_ends_the_text_counts(tmp_path):
    paths = [
        save_random_classifier(tmp_path / f"{pad}", "llama", pad_token_id=pad)
        for pad in (None, character_tokenizer().eos_token_id, character_tokenizer().pad_token_id)
    ]
    none, eos, plain = [built(path).score_batch(rollout()).scores for path in paths]
    # The embedding of the pad token starts at zero, so models with other pad tokens have other weights there.
    texts = [(f"{prompt}{response}<eos>",) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    np.testing.assert_allclose(none, row_by_row(paths[0], texts), atol=1e-5)
    np.testing.assert_allclose(plain, row_by_row(paths[2], texts), atol=1e-5)
    assert np.abs(eos - row_by_row(paths[1], texts)).max() > 0.01  # transformers would stop before the <eos>


def test_one_of_several_labels_is_the_score(tmp_path):
    save_random_classifier(tmp_path, "llama", num_labels=3)
    texts = [(f"{prompt}{response}<eos>",) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    scores = built(tmp_path, label=2).score_batch(rollout()).scores
    np.testing.assert_allclose(scores, row_by_row(tmp_path, texts, label=2), atol=1e-5)
    with refusal("label"):
        described(tmp_path)
    with refusal("label"):
        described(tmp_path, label=3)


def test_what_is_no_reward_model_is_refused_before_it_loads(tmp_path):
    save_random_model(tmp_path / "policy", "qwen2", torch.float32)
    with refusal("model.path"):
        described(tmp_path / "policy")
    for options, fault in [({"max_length": 1}, "max_length is 1"), ({"micro_batch_tokens": 0}, "micro_batch_tokens")]:
        with pytest.raises(ConfigError, match=fault):
            described("owner/model", **options)
    with refusal("label"):
        described("owner/model", label=-1)


def test_a_form_that_the_tokenizer_does_not_allow_is_refused(tmp_path):
    save_random_classifier(tmp_path, "bert", word_tokenizer())
    with refusal("reads"):
        built(tmp_path, reads="tokens")
    with refusal("parts.judge.reads"):
        WeightedSum(parts={"judge": described(tmp_path, reads="chat")}, weights={"judge": 1.0}).build(BuildContext())


def test_a_row_longer_than_the_model_reads_is_named_or_cut_on_the_left(tmp_path):
    save_random_classifier(tmp_path / "decoder", "llama")
    with pytest.raises(RewardError, match=r"(?s)at most 10 tokens, the max_length.*Found: 22 tokens.*Sample: 1, "):
        built(tmp_path / "decoder", max_length=10).score_batch(rollout())
    result = built(tmp_path / "decoder", max_length=10, truncation="left").score_batch(rollout())
    texts = [(f"{prompt}{response}"[-9:] + "<eos>",) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    np.testing.assert_allclose(result.scores, row_by_row(tmp_path / "decoder", texts), atol=1e-5)
    assert list(result.parts["truncated"]) == [0, 1, 0, 1]

    save_random_classifier(tmp_path / "encoder", "bert", word_tokenizer())
    reward = built(tmp_path / "encoder", max_length=5, truncation="left")
    reading = reward.reader(rollout(["what is what"], ["is 7"]), reward.producer)
    assert reward.reader.tokenizer.decode(reading.ids[0]) == "[CLS]is 7 [SEP]"
    assert built(tmp_path / "encoder").reader.max_length == 64


def test_a_row_without_tokens_and_a_score_that_is_no_number_are_named(tmp_path):
    path = save_random_classifier(tmp_path, "llama", other_characters(None))
    with pytest.raises(RewardError, match=r"(?s)at least one token.*Sample: 1"):
        built(path).score_batch(rollout(["1", ""], ["1", ""]))
    reward = built(path)
    embedding = reward.model.classifier.base_model.embed_tokens
    with torch.no_grad():
        embedding.weight[reward.reader.tokenizer.convert_tokens_to_ids("?")] = float("nan")
    with pytest.raises(RewardError, match=r"(?s)4 finite numbers.*Found: nan.*Sample: 1, prompt 'what is 6\*7\? '"):
        reward.score_batch(rollout())


def test_weights_are_kept_in_the_dtype_asked_for_and_let_go_at_the_end(tmp_path):
    save_random_classifier(tmp_path, "llama")
    model = Pretrained(path=str(tmp_path), dtype="bfloat16")
    reward = RewardModel(model=model).build(BuildContext(tokenizer=character_tokenizer()))
    assert {p.dtype for p in reward.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in reward.model.parameters())
    np.testing.assert_allclose(
        reward.score_batch(rollout()).scores, built(tmp_path).score_batch(rollout()).scores, atol=0.2
    )
    reward.close()
    assert reward.model is None


def test_any_module_that_returns_scores_is_a_reward_model():
    class Lengths(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, input_ids, attention_mask):
            return RewardHeadOutput(self.scale * attention_mask.sum(dim=1))

    reward = ModelReward(
        Lengths(), RewardTokenizer(character_tokenizer(), "tokens", None, "error"), micro_batch_tokens=40
    )
    texts = zip(PROMPTS, RESPONSES, strict=True)
    assert list(reward.score_batch(rollout()).scores) == [0.5 * (len(a + b) + 1) for a, b in texts]


SMALL = [
    "actor=tiny_scratch", "actor.model.hidden_size=32", "actor.model.num_layers=1", "algorithm=grpo",
    "data.train_size=16", "data.held_out=4", "trainer.prompts_per_step=4", "trainer.total_steps=2",
    "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=0", "trainer.save_final=false",
]  # fmt: skip


def trained(overrides, run_dir):
    run = validate(compose_root("ppo", [*SMALL, *overrides]))
    with run.build(BuildContext(run_dir=run_dir)) as trainer:
        assert trainer.fit().status == "finished"
        assert trainer.reward is not None
        form = trainer.reward.reader.form
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]
    return form, lines, read_lines(run_dir / "samples" / "step_2.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"), [("llama", "tokens"), pytest.param("bert", "text", marks=pytest.mark.exhaustive)]
)
def test_a_run_takes_its_reward_from_a_model(family, form, tmp_path):
    path = save_random_classifier(tmp_path / "judge", family, word_tokenizer() if family == "bert" else None)
    read, lines, samples = trained(["reward=model", f"reward.model.path={path}"], tmp_path / "run")
    assert read == form
    assert len(lines) == 2
    assert all(line["reward/std"] > 1e-4 for line in lines)
    reward = described(path, reads="text").build(BuildContext())
    batch = rollout([row["prompt_text"] for row in samples], [row["response_text"] for row in samples])
    if form == "text":  # the samples show no <eos>, which the ids of the policy have
        np.testing.assert_allclose(reward.score_batch(batch).scores, [row["score"] for row in samples], atol=1e-4)


@pytest.mark.slow
def test_evaluation_does_not_change_what_scores_are_normalised_by(tmp_path):
    path = save_random_classifier(tmp_path / "judge", "llama")
    overrides = ["reward=model", f"reward.model.path={path}", "reward.normalize=running"]
    run = validate(compose_root("ppo", [*SMALL, *overrides]))
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert list(trainer.fit().evaluations) == [0, 2]
        assert trainer.reward.norm.count == 2 * 4 * 4
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert lines[0]["reward/mean"] == pytest.approx(0.0, abs=1e-9)
    assert lines[0]["reward/std"] == pytest.approx(1.0)
    assert lines[0]["reward/raw"] != pytest.approx(0.0, abs=1e-4)


def test_the_statistics_of_a_part_are_kept_forgotten_and_taken_over_through_the_sum(tmp_path):
    part = described(save_random_classifier(tmp_path, "llama"), normalize="running")
    context = BuildContext(tokenizer=Pretrained(path=str(tmp_path)).load_tokenizer())
    sums = [
        WeightedSum(parts={"judge": part, "rule": ExactMatch()}, weights={"judge": 1.0, "rule": 0.0}).build(context)
        for _ in range(2)
    ]
    batch = rollout(answer=["3"] * 4)
    with sums[0].frozen():
        raw = sums[0].score_batch(batch).scores
    np.testing.assert_array_equal(raw, built(tmp_path).score_batch(batch).scores)
    result = sums[0].score_batch(batch)
    np.testing.assert_allclose(result.parts["judge"], (raw - raw.mean()) / raw.std())
    np.testing.assert_array_equal(result.parts["judge_raw"], raw)
    state = sums[0].state_dict()
    assert list(state) == ["judge"]
    sums[1].load_state_dict(state)
    assert sums[1].state_dict() == state
    sums[1].reset_stats()
    assert sums[1].state_dict()["judge"]["count"] == 0


def test_faults_that_show_when_the_model_is_read_are_told_by_their_path(dir32, tmp_path):
    path = save_random_classifier(tmp_path / "judge", "bert", word_tokenizer())
    run = ppo_run(Pretrained(path=str(dir32)), reward=described(path, reads="chat"))
    with refusal("reward.reads"):
        run.build(BuildContext(run_dir=tmp_path / "run"))
    with refusal("reward.model.path"):
        validate(compose_root("ppo", ["reward=model", f"reward.model.path={dir32}"]))
