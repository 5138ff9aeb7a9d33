"""`verl eval` of a chat model on a file: its template, temperature and length, intervals, and what follows a kill."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from verl.cli.main import app
from verl.compose.load_policy import locate_policy, policy_run, response_limit, root_of
from verl.monitoring.ppo_metrics import interval_of_mean, pass_at_k
from verl.trainer.ppo import PPOTrainer

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(5)]
OPTIONS = ("trainer.num_threads=1", "rollout.max_new_tokens=3", "--samples", "3")


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("verl.cli.generate.BATCH_ROWS", 2)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def evaluated(*arguments) -> dict:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_estimate_of_pass_at_k_is_the_mean_over_all_choices_of_k_responses():
    for right in itertools.product([0, 1], repeat=5):
        for k in range(1, 6):
            chosen = [any(choice) for choice in itertools.combinations(right, k)]
            assert pass_at_k(sum(right), 5, k) == pytest.approx(sum(chosen) / len(chosen))


def test_an_interval_is_wilsons_and_never_of_no_width():
    # Agresti & Coull 1998: 0 of 10 right
    assert interval_of_mean([0.0] * 10) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    mean, low, high = interval_of_mean([1.0] * 7 + [0.0] * 3)
    assert low < mean < high
    _, *wide = interval_of_mean([1.0, 0.0] * 10, samples=4)  # responses to a prompt are all alike
    _, *narrow = interval_of_mean([0.5] * 20, samples=4)
    assert narrow[1] - narrow[0] < 0.6 * (wide[1] - wide[0])


def test_an_interval_covers_the_truth_as_often_as_it_says():
    generator, covered = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        chances = torch.rand(60, generator=generator)  # of each prompt; their mean is 1/2
        right = torch.rand(60, 4, generator=generator) < chances[:, None]
        _, low, high = interval_of_mean(right.double().mean(dim=1).tolist(), samples=4)
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_file_is_answered_by_the_template_at_temperature_1_with_intervals(dir32, file):
    told = evaluated(dir32, "--data", file, *OPTIONS)
    assert told["settings"]["temperature"] == 1.0
    assert set(told["intervals"]) == {"eval/accuracy", "eval/mean@3", *(f"eval/pass@{k}" for k in (1, 2, 3))}
    for key, (low, high) in told["intervals"].items():
        assert low <= told["metrics"][key] <= high
    _, *records = [json.loads(line) for line in Path(told["results"]).read_text().splitlines()]
    assert len(records) == 5 * (1 + 3)
    assert records[0]["prompt"] == "<user>0+1=<eos><assistant>"
    told = evaluated(dir32, "--data", file, *OPTIONS, "data.as_chats=false")
    assert json.loads(Path(told["results"]).read_text().splitlines()[1])["prompt"] == "0+1="


@pytest.mark.slow
def test_a_killed_evaluation_continues_and_comes_to_the_same(dir32, file, tmp_path, monkeypatch):
    whole = evaluated(dir32, "--data", file, *OPTIONS)
    real, asked = PPOTrainer.evaluation_records, []

    def killed(trainer, rows, step):
        asked.append(rows)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(trainer, rows, step)

    monkeypatch.setattr(PPOTrainer, "evaluation_records", killed)
    again = ["eval", str(dir32), "--data", str(file), *OPTIONS, "--json"]
    assert CliRunner().invoke(app, again).exit_code != 0
    with open(whole["results"], "ab") as results:
        results.write(b'{"kind": "greedy", "sco')  # as of a kill within a write
    assert json.loads(CliRunner().invoke(app, again).stdout) == whole
    assert [rows.start for rows in asked] == [0, 2, 4, 4]
    file.write_text(file.read_text().replace('"1"', '"2"'))
    evaluated(dir32, "--data", file, *OPTIONS)  # another file: nothing is taken over
    assert [rows.start for rows in asked[4:]] == [0, 2, 4]


def test_a_model_is_evaluated_in_bfloat16_which_would_be_refused_to_train(dir32, file):
    told = evaluated(dir32, "--data", file, *OPTIONS, "actor.model.dtype=bfloat16")
    assert told["settings"]["dtype"] == "bfloat16"


def test_the_length_of_responses_is_that_of_the_model(dir32, file, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(dir32, model)
    assert response_limit(model) == 32  # half of its context
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5}))
    described = policy_run(locate_policy(str(model)), "ppo", [], file)
    assert (described.rollout.max_new_tokens, described.rollout.temperature) == (5, 1.0)
    assert described.data.max_prompt_length == 59


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("option", ["rollout=hf", "rollout=auto"])
def test_another_engine_samples_as_the_run_did_and_not_as_a_default(option, dir32, file, tmp_path):
    """Options of groups are composed over what sets lengths and temperatures for the built-in sums."""
    described = policy_run(locate_policy(str(dir32)), "ppo", [option], file)
    assert (described.rollout.temperature, described.rollout.max_new_tokens) == (1.0, 32)
    described = policy_run(recorded(dir32, tmp_path), "ppo", [option])
    assert (described.rollout.temperature, described.rollout.max_new_tokens) == (0.7, 9)


def recorded(model: Path, tmp_path: Path, **config):
    """The policy of a run without checkpoints, whose configuration is beside its weights."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "actor", dirs_exist_ok=True)
    config = {
        "_target_": "verl.trainer.ppo_config.PPORun",
        "data": {"_target_": "verl.data.arithmetic.ArithmeticPrompts", "held_out": 3},
        "rollout": {"_target_": "verl.rollout.hf.HFRollout", "temperature": 0.7, "max_new_tokens": 9},
        "reward": {"_target_": "verl.rewards.rules.ExactMatch"},
        **config,
    }
    (run / "policy.json").write_text(json.dumps({"step": 7, "config": config}))
    assert locate_policy(str(run)) == locate_policy(str(run / "actor"))
    return locate_policy(str(run))


def test_what_lies_beside_weights_is_trusted_no_more_than_a_checkpoint(dir32, tmp_path):
    evil = {"_target_": "verl.rewards.function.RewardFunction", "path": "evil.py:score"}
    saved = recorded(dir32, tmp_path, reward=evil)
    assert saved.step == 7
    assert "reward.path=evil.py:score" in refused("eval", saved.actor.parent)
    (saved.actor.parent / "policy.json").write_text('{"step": [1], "config": {"_target_": [], "data": {"x": []}}}')
    assert "data is {'x': []}" in refused("eval", saved.actor.parent)
    assert locate_policy(str(saved.actor)).step == 0


def refused(*arguments) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_a_fine_tuned_policy_is_evaluated_by_its_loss_unless_a_reward_is_named(dir32, tmp_path):
    saved = recorded(dir32, tmp_path, _target_="verl.trainer.sft.SFTRun")
    assert root_of(saved) == "sft"
    assert root_of(saved, ["reward=math"]) == "ppo"
