"""`history=rerender`: each turn a sample of its own, behind what the template renders; credit is given to episodes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from environments.episodes import REQUEST, Scripted, ScriptedFactory, engine_of, long_turns, prompts_of, tiny
from refusals import refusal
from roles import assert_own_log_probs

from verl.component import BuildContext, component
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.environments.base import EnvironmentDescription, InfraError, StepResult
from verl.environments.episode import per_episode, training_rows, without_dropped
from verl.ops.masking import LossTotals, aggregate
from verl.protocol import DataProto
from verl.rewards.episode_reward import EpisodeReward
from verl.trainer.ppo import PPOTrainer

STOPS = tuple(range(20, 60))
# As Qwen3 does with thinking: of the assistant's earlier turns only the last two characters are kept.
SHORTENS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + "
    "(m['content'][-2:] if m['role'] == 'assistant' else m['content']) + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@component
class LongTurns(EnvironmentDescription):
    """`long_turns`, in a class whose settings are plain values."""

    def factory(self, context):
        return ScriptedFactory(long_turns, {})


@pytest.fixture(scope="module")
def model():
    return tiny()


def chats(tokenizer, texts):
    messages = [[{"role": "user", "content": text}] for text in texts]
    rendered = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    return prompts_of(tokenizer, rendered, prompt_messages=messages)


def answer(row, turn, action):
    return StepResult("<eos>ab" * turn, float(turn), terminated=turn >= 3)


def test_each_turn_is_a_sample_behind_the_templates_own_rendering(model):
    net, tokenizer = model[0], model[0] and tiny()[1]
    tokenizer.chat_template = SHORTENS
    engine = engine_of(Scripted(answer=answer, history="rerender"), model=(net, tokenizer), stop_token_ids=STOPS)
    texts = ["1+2=", "34+5=", "what is 6*7? "]
    episodes = without_dropped(engine.generate(chats(tokenizer, texts), REQUEST))
    rows = training_rows(episodes)
    engine.close()
    assert sum(len(record["turns"]) for record in episodes["episode"]) == len(rows) > 20
    begin = 0
    while begin < len(rows):
        record = rows["episode"][begin]
        messages = [{"role": "user", "content": texts[int(rows["prompt_ids"][begin])]}]
        for number, turn in enumerate(record["turns"]):
            row = begin + number
            prompt = tokenizer.decode(rows["prompts"][row][rows["prompt_mask"][row]])
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert prompt == rendered
            mask = rows["response_mask"][row]
            own = rows["responses"][row][mask].tolist()
            assert int(mask.sum()) == turn["tokens"]
            assert set(rows["turn_ids"][row][mask].tolist()) == {number}
            assert rows["turn_rewards"][row][mask][-1] == turn["reward"]
            # What the environment answered has "<eos>" in it as five characters.
            assert rows["prompts"][row].tolist().count(tokenizer.eos_token_id) == 1 + 2 * number
            text = tokenizer.decode(own).removesuffix("<eos>")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn["observation"]}]
        line = episodes[rows["episode_ids"][begin] == episodes["episode_ids"]]
        whole = line["input_ids"][0][line["attention_mask"][0].bool()].tolist()
        before = rows["input_ids"][begin][rows["attention_mask"][begin].bool()].tolist()
        assert whole[: len(before)] == before  # its prompt and first turn, and then those of the other rows
        assert (
            whole[len(before) :]
            == rows["responses"][begin + 1 : row + 1][rows["response_mask"][begin + 1 : row + 1]].tolist()
        )
        assert set(rows["episode_tokens"][begin : row + 1].tolist()) == {sum(t["tokens"] for t in record["turns"])}
        begin = row + 1
    assert_own_log_probs(net, rows, atol=2e-5)


def test_an_episode_that_is_left_out_leaves_no_part(model):
    def failing(row, turn, action):
        if row["prompt_id"] == 1:
            raise InfraError("it is down")
        return long_turns(row, turn, action)

    environment = Scripted(answer=failing, history="rerender", retries=0, on_infra="drop_group")
    engine = engine_of(environment, model=model, stop_token_ids=STOPS)
    drawn = engine.generate(chats(model[1], ["1+2=", "34+5=", "6*7="]), REQUEST)
    engine.close()
    episodes = without_dropped(drawn)
    rows = training_rows(episodes)
    assert set(rows["prompt_ids"].tolist()) == set(episodes["prompt_ids"].tolist()) == {0, 2}
    assert len(episodes) == 8 < len(rows)
    assert episodes["episode"][0]["left_out"] == 4
    of_rows = DataProto.from_dict({name: rows[name] for name in ("turn_rewards", "rollout_log_probs", "sample_ids")})
    back = per_episode(of_rows, episodes)
    for name in of_rows.batch:
        assert torch.equal(back[name], episodes[name])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_loss_of_parts_is_that_of_whole_episodes(mode):
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(2, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    whole = aggregate(losses, mask, mode, LossTotals.of(mask))
    parts = torch.stack([losses[0, :3], losses[0, 3:], losses[1, :3]])  # the first episode has two rows
    parts_mask = torch.stack([mask[0, :3], mask[0, 3:], mask[1, :3]])
    tokens = torch.tensor([5, 5, 2])
    totals = LossTotals.of(parts_mask, tokens)
    assert totals.sequences == pytest.approx(2)
    found = sum(
        aggregate(parts[i : i + 1], parts_mask[i : i + 1], mode, totals, None, tokens[i : i + 1]) for i in range(3)
    )
    assert float(found) == pytest.approx(float(whole))


def trained(directory, history, overrides):
    """Weights and metrics of a step on a template that keeps earlier turns as they are."""
    rows = directory.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(12)))
    small = [
        "actor=tiny_scratch", "actor.model.dtype=float64", "actor.model.context_length=160",
        "actor.model.hidden_size=32", "actor.model.intermediate_size=64", "data=files",
        f"data.train_files=[{rows}]", "data.system_prompt=add", "data.max_prompt_length=40", "reward=length",
        "rollout.max_new_tokens=6", "trainer.prompts_per_step=3", "trainer.group_size=4", "trainer.total_steps=1",
        "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=0", "tracker=jsonl",
        "trainer.save_final=false", "checkpoint=off", f"rollout.stop_token_ids={list(STOPS)}".replace(" ", ""),
    ]  # fmt: skip
    run = validate(compose_root("ppo", [*small, *overrides]))
    run = replace(run, environment=LongTurns(history=history, max_tokens=60), reward=EpisodeReward())
    with PPOTrainer(run, BuildContext(run_dir=directory)) as trainer:
        trainer.fit()
        weights = {name: x.detach().clone() for name, x in trainer.actor_worker.model.named_parameters()}
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return weights, [line for line in lines if "episode/turns" in line]


CASES = {
    "grpo": ["algorithm=grpo", "critic=none", "algorithm.aggregation=seq-mean-token-mean", "algorithm.mini_batches=2"],
    "gae": ["algorithm=ppo", "critic=tiny_scratch", "algorithm.advantage.gamma=0.9", "algorithm.advantage.lam=0.8",
            "algorithm.advantage.discount=turn"],
    "rloo": ["algorithm=rloo", "critic=none"],
    "reinforce_pp": ["algorithm=reinforce_pp", "critic=none"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gae" else pytest.mark.exhaustive) for name in CASES]
)
def test_where_the_template_keeps_every_turn_training_is_that_of_whole_rows(tmp_path, name):
    whole, of_rows = trained(tmp_path / "append", "append", CASES[name])
    parts, of_parts = trained(tmp_path / "rerender", "rerender", CASES[name])
    assert of_parts[0]["episode/samples"] > 1.3
    for key in ("reward/mean", "reward/std", "episode/turns", "actor/loss", "perf/tokens"):
        assert of_parts[0][key] == pytest.approx(of_rows[0][key], rel=1e-6, abs=1e-7), key  # rewards are float32
    for key, x in whole.items():
        torch.testing.assert_close(parts[key], x, rtol=0, atol=2e-6)


def test_a_prompt_that_is_no_chat_is_refused(model):
    engine = engine_of(Scripted(answer=answer, history="rerender"), model=model)
    with refusal("environment.history"):
        engine.generate(prompts_of(model[1], ["1+2="]), REQUEST)
    engine.close()
