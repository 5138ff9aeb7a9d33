"""The loop around a trainer: what it evaluates when, what it writes, and how it ends."""

import json

import pytest
import torch
from random_models import save_random_model
from trainer.runs import GRPO_ALGORITHM, JSONL, Prompts, fit, ppo_run, read_lines

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.errors import CheckpointWriteFailed
from verl.models.pretrained import Pretrained
from verl.tracking.logging_setup import setup_logging
from verl.workers.critic import Critic


def test_a_run_evaluates_before_during_and_after_and_says_what_it_did(model32, tmp_path):
    run = ppo_run(model32, total_steps=3, eval_interval=2, eval_samples=3, tracker=JSONL)
    undo = setup_logging(tmp_path)
    try:
        result = fit(run, tmp_path)
    finally:
        undo()
    assert (result.status, result.steps) == ("finished", 3)
    assert list(result.evaluations) == [0, 2, 3]
    assert set(result.evaluations[3]) >= {"eval/accuracy", "eval/mean@3", "eval/best@3"}

    lines = read_lines(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "eval/accuracy" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    stages = ["gen", "reward", "old", "ref", "values", "adv", "update_critic", "update_actor", "sync"]
    for line in steps:
        assert [f"timing/{stage}_s" for stage in stages] == [k for k in line if k.startswith("timing/")][: len(stages)]
        assert {"reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "kl/reference_nats"} <= set(line)
    log = (tmp_path / "run.log").read_text()
    for stage in [*stages, "eval", "save"]:
        assert f"[{stage}] " in log
    assert "[gen]" in log
    assert "6 responses to 3 prompts" in log

    tables = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert tables == [f"step_{step}.jsonl" for step in (0, 2, 3)]
    (row,) = read_lines(tmp_path / "samples" / "step_0.jsonl")  # the one held-out prompt
    assert row["prompt_text"] == "5+5="
    assert {"table", "response_text", "score", "length"} <= set(row)

    for step, metrics in result.evaluations.items():
        rows = read_lines(tmp_path / "evals" / f"step_{step}.jsonl")
        assert [(row["kind"], row["prompt_id"], row["sample_id"]) for row in rows] == [
            ("greedy", rows[0]["prompt_id"], 0), *(("sampled", rows[0]["prompt_id"], sample) for sample in range(3))
        ]  # fmt: skip
        assert rows[0]["score"] == metrics["eval/score"]
        assert len({row["prompt_digest"] for row in rows}) == 1
        assert rows[0]["tokens"] == metrics["eval/response_length_tokens"]
        assert sum(row["success"] for row in rows[1:]) / 3 == metrics["eval/mean@3"]
    assert sorted(file.name for file in (tmp_path / "evals").iterdir()) == tables
    tables = sorted(file.name for file in (tmp_path / "tokens").iterdir())
    assert tables == [f"step_{step}.jsonl" for step in (1, 2, 3)]
    for step in (1, 2, 3):
        rows = read_lines(tmp_path / "tokens" / f"step_{step}.jsonl")
        assert [row["sample_id"] for row in rows] == [0, 1] * 3
        (metrics,) = [line for line in steps if line["step"] == step]
        assert sum(row["score"] for row in rows) / 6 == pytest.approx(metrics["reward/mean"])
        for name, key in (("advantages", "advantages/mean"), ("entropies", "rollout/entropy_nats")):
            numbers = [number for row in rows for number in row[name]]
            assert sum(numbers) / len(numbers) == pytest.approx(metrics[key], abs=1e-5)
        for row in rows:
            lists = "ids texts rollout_log_probs old_log_probs entropies advantages mask versions"
            assert len({len(row[name]) for name in lists.split()}) == 1
            assert row["mask"] == [1] * len(row["ids"])
            assert set(row["versions"]) == {2 * step - 2}
    assert json.loads((tmp_path / "plan.json").read_text())["phases"]

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert list(summary["evaluations"]) == ["0", "2", "3"]
    assert summary["saved"] == [str(tmp_path / "actor"), str(tmp_path / "critic")]
    for role in ("actor", "critic"):
        Pretrained(path=str(tmp_path / role)).load_backbone("cpu")
        Pretrained(path=str(tmp_path / role)).load_tokenizer()


def test_a_run_without_held_out_prompts_does_not_evaluate(model32, tmp_path):
    run = ppo_run(model32, GRPO_ALGORITHM, data=Prompts(eval=()), critic=None, total_steps=1)
    result = fit(run, tmp_path)
    assert result.evaluations == {}
    assert [path.name for path in result.saved] == ["actor"]


def test_a_run_that_cannot_save_is_an_error_that_leaves_its_summary(model32, tmp_path):
    (tmp_path / "actor").write_text("in the way")
    run = ppo_run(model32, total_steps=1, eval_before=False, tracker=JSONL)
    with (
        run.build(BuildContext(run_dir=tmp_path)) as trainer,
        pytest.raises(CheckpointWriteFailed, match=r"writing the final weights to .*actor"),
    ):
        trainer.fit()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 1]


@pytest.mark.slow
def test_a_critic_of_another_family_with_the_tokenizer_of_the_actor_trains(tmp_path):
    actor = save_random_model(tmp_path / "llama", "llama", torch.float32)
    critic = save_random_model(tmp_path / "gpt_neox", "gpt_neox", torch.float32)
    run = ppo_run(
        Pretrained(path=str(actor)),
        critic=Critic(model=Pretrained(path=str(critic)), optimizer=AdamW(lr=1e-2)),
        total_steps=3,
        tracker=JSONL,
    )
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert trainer.fit().status == "finished"
    kinds = [
        json.loads((tmp_path / "run" / name / "config.json").read_text())["model_type"] for name in ("actor", "critic")
    ]
    assert kinds == ["llama", "gpt_neox"]
    losses = [line["critic/loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "critic/loss" in line]
    assert losses[-1] < losses[0]
