"""`environment=agent_program`: programs that know of nothing but an endpoint train the policy, exact in tokens."""

import json
from dataclasses import replace

import pytest
from refusals import refusal
from roles import assert_own_log_probs

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.environments.episode import training_rows
from verl.errors import RolloutError
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo import PPOTrainer

# Two turns of one conversation, and a second conversation beside them, as a summary would be.
PROGRAM = """
import json
import urllib.request


def ask(base_url, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def play(row, base_url):
    messages = [{"role": "user", "content": row["prompt_text"]}]
    first = ask(base_url, messages)
    second = ask(base_url, [*messages, first, {"role": "user", "content": "and <eos>now?"}])
    third = ask(base_url, [{"role": "user", "content": "sum up"}])
    return len(second["content"]) - len(third["content"])


def fail(row, base_url):
    if row["prompt_text"].startswith("1"):
        raise RuntimeError("the program is broken")
    return play(row, base_url)


def endless(row, base_url):
    messages = [{"role": "user", "content": row["prompt_text"]}]
    while True:
        messages += [ask(base_url, messages), {"role": "user", "content": "go on"}]
"""
STOPS = f"rollout.stop_token_ids={list(range(20, 60))}".replace(" ", "")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(6)))

    def made(function="play", *overrides):
        options = [
            "actor=tiny_scratch", "actor.model.context_length=160", "critic=none", "algorithm=grpo", "data=files",
            f"data.train_files=[{rows}]", "data.max_prompt_length=40", "reward=environment",
            "rollout.max_new_tokens=6", "environment=agent_program",
            f"environment.path={tmp_path}/program.py:{function}",
            "environment.max_tokens=100", "environment.retries=1", "trainer.prompts_per_step=2", "trainer.group_size=3",
            "trainer.total_steps=2", "trainer.num_threads=1", "trainer.device=cpu", "trainer.eval_samples=0",
            "tracker=jsonl", "trainer.save_final=false", "checkpoint=off", STOPS, *overrides,
        ]  # fmt: skip
        return PPOTrainer(validate(compose_root("ppo", options)), BuildContext(run_dir=tmp_path / function))

    return made


def tokens_of(rows):
    """(prompt, sample) -> tokens of its rows."""
    found = {}
    for row in range(len(rows)):
        key = int(rows["prompt_ids"][row]), int(rows["sample_ids"][row])
        ids = rows["input_ids"][row][rows["attention_mask"][row].bool()].tolist()
        found.setdefault(key, []).append((ids, rows["response_mask"][row].nonzero().flatten().tolist()))
    return {key: sorted(parts) for key, parts in found.items()}


def test_programs_against_the_endpoint_train_the_policy(run, tmp_path):
    with run() as trainer:
        tokenizer, model = trainer.tokenizer, trainer.actor_worker.model
        prompts = trainer.train_data.collate(range(4))
        episodes = trainer.sampling.generate(prompts, GenerationRequest(1, 3))
        rows = training_rows(episodes)
        assert len(episodes) == 12
        assert len(rows) == 24  # the conversation of two turns is one row, the other one another
        for record in episodes["episode"]:
            assert [len(record["turns"]), record["end"]] == [3, "terminated"]
        longer = [row for row in range(len(rows)) if len(set(rows["turn_ids"][row].tolist()) - {-1}) == 2]
        assert len(longer) == 12
        for row in longer:
            text = tokenizer.decode(rows["input_ids"][row][rows["attention_mask"][row].bool()])
            assert text.count("and <eos>now?") == 1
            between = rows["responses"][row][~rows["response_mask"][row] & (rows["turn_ids"][row] >= 0)].tolist()
            assert between.count(tokenizer.eos_token_id) <= 2  # those of the template; in the message it is text
        assert_own_log_probs(model, rows, atol=2e-5)

        whole = tokens_of(rows)
        alone = training_rows(trainer.sampling.generate(prompts[2:3], GenerationRequest(1, 3)))
        assert tokens_of(alone).items() <= whole.items()  # whatever ran beside them, and in whatever order
        trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "play" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "episode/turns" in line]
    assert [line["episode/turns"] for line in steps] == [3, 3]
    assert steps[0]["episode/samples"] == 2
    assert steps[0]["rollout/log_prob_gap_nats"] < 1e-5
    assert steps[0]["reward/std"] > 0
    assert steps[0]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_what_fails_never_becomes_a_reward_and_what_a_limit_cuts_is_named(run):
    with run("fail") as trainer:
        rows = trainer.sampling.generate(trainer.train_data.collate(range(3)), GenerationRequest(1, 3))
        assert set(rows["prompt_ids"].tolist()) == {0, 2}
        assert rows["episode"][0]["left_out"] == 3
        environment = trainer.actor_worker.generator.options
        trainer.actor_worker.generator.options = replace(environment, on_infra="stop")
        with refusal("the program is broken", "in fail", "on_infra is stop", kind=RolloutError, varies=True):
            trainer.sampling.generate(trainer.train_data.collate(range(3)), GenerationRequest(1, 3))
    with run("endless", "environment.max_turns=4") as trainer:
        rows = trainer.sampling.generate(trainer.train_data.collate(range(2)), GenerationRequest(1, 3))
        records = rows["episode"]
        assert {record["end"] for record in records} <= {"turns", "tokens"}
        assert {len(record["turns"]) for record in records if record["end"] == "turns"} == {4}
        assert not rows["turn_rewards"].any()


@pytest.mark.parametrize(("key", "value"), [("path", None), ("history", "rerender")])
def test_what_does_not_go_is_refused(run, key, value):
    with refusal(f"environment.{key}"):
        run("play", f"environment.{key}={'null' if value is None else value}")


@pytest.mark.exhaustive
def test_a_program_of_its_own_with_openais_client_trains_too(run, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(
        "import json, sys\nfrom openai import OpenAI\nrow = json.load(sys.stdin)\n"
        "messages = [{'role': 'user', 'content': row['prompt_text']}]\n"
        "with OpenAI() as client:\n"
        "    for _ in range(2):\n"
        "        answer = client.chat.completions.create(model='policy', messages=messages).choices[0].message\n"
        "        messages += [answer, {'role': 'user', 'content': 'go on'}]\n"
        "sys.stderr.buffer.write(b'no text: \\xff')\nprint('thinking aloud')\nprint(len(answer.content))\n"
    )
    import sys

    command = f"environment.command=[{sys.executable},{tmp_path}/agent.py]"
    with run("play", "environment.path=null", command) as trainer:
        rows = trainer.sampling.generate(trainer.train_data.collate(range(2)), GenerationRequest(1, 2))
    assert len(training_rows(rows)) == 4
    for row in range(4):
        turns = rows["episode"][row]["turns"]
        assert float(rows["turn_rewards"][row].sum()) == len(turns[1]["text"])
