"""LocalPPOTrainer: a short file, rows and a reward of the user's, no command line."""

import json
from pathlib import Path

import pytest
import yaml
from refusals import refusal, refused

from verl.compose.compose import compose_root
from verl.compose.from_yaml import compose_over_default
from verl.data.rlhf_dataset import RLHFDataset
from verl.models.tiny import TinyModel
from verl.trainer.local_trainer import PREFERENCES, LocalPPOTrainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SHORT = {
    "actor": "tiny_scratch",
    "trainer": {
        "project_name": "mine",
        "experiment_name": "first",
        "n_gpus_per_node": 1,
        "nnodes": 1,
        "total_epochs": 1,
        "save_freq": -1,
        "backend": "local",
        "total_steps": 1,
        "prompts_per_step": 4,
        "group_size": 2,
        "eval_samples": 0,
    },
    "actor_rollout": {"use_vllm": False, "fsdp_config": {"sharding_strategy": "NO_SHARD", "cpu_offload": False}},
    "data": {"max_prompt_length": 8},
    "rollout": {"max_new_tokens": 4},
    "tracker": "none",
    "use_critic": True,
    "use_reference_policy": True,
    "use_rm": False,
}


def score(prompts, responses, answer):
    return [float(response == right) for response, right in zip(responses, answer)]


@pytest.fixture
def short_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**changes) -> str:
        Path("config.yaml").write_text(yaml.safe_dump({**SHORT, **changes}))
        return "config.yaml"

    return write


def test_a_script_that_torchrun_has_started_twice_does_not_train_twice(short_file, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with refusal("torchrun", value=2):
        LocalPPOTrainer(short_file(), train_dataset=ROWS, reward_fn=score)


def test_a_line_for_every_stage_is_the_default_of_a_script_and_not_of_a_command():
    def console(*overrides: str):
        return compose_over_default({}, overrides, preferences=PREFERENCES).config.tracker.console

    assert console().stage_lines
    assert not console("tracker.console.stage_lines=false").stage_lines
    assert console("tracker=none") is None
    assert not compose_root("ppo").tracker.console.stage_lines


def test_a_run_that_this_machine_cannot_have_leaves_no_directory(short_file, monkeypatch):
    with refusal("resume", value="/no/such/run"):
        LocalPPOTrainer(short_file(resume="/no/such/run"), train_dataset=ROWS, reward_fn=score)
    assert not Path("outputs").exists()


def test_a_short_file_with_rows_and_a_reward_function_trains(short_file):
    with LocalPPOTrainer(short_file(), train_dataset=ROWS, reward_fn=score) as trainer:
        result = trainer.fit()
        trainer.close()
    assert (result.status, result.steps) == ("finished", 1)
    assert trainer.run_dir.parts[-3:-1] == ("mine", "first")
    written = {file.name for file in trainer.run_dir.iterdir()}
    assert {"config.yaml", "overrides.yaml", "run.log", "actor", "critic"} <= written


@pytest.mark.slow
def test_overrides_win_over_the_file_and_a_path_is_data(short_file):
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    overrides = ["trainer.group_size=3", "algorithm=grpo", "actor.optimizer.lr=1e-4"]
    with LocalPPOTrainer(short_file(), "rows.jsonl", overrides=overrides) as trainer:
        assert trainer.run.trainer.group_size == 3
        assert trainer.run.actor.optimizer.lr == 1e-4
        assert trainer.trainer.critic is None
        assert len(trainer.trainer.train_data) == len(ROWS)


def rows_for(length=8, pad="<pad>"):
    tokenizer = TinyModel().load_tokenizer()
    tokenizer.pad_token = pad
    return RLHFDataset.from_rows(ROWS, tokenizer, {"max_prompt_length": length})


def test_a_dataset_made_by_the_user_is_taken(short_file):
    dataset = rows_for()
    with LocalPPOTrainer(short_file(), train_dataset=dataset) as trainer:
        assert trainer.trainer.train_data is dataset


def written(text):
    Path("short.yaml").write_text(text)
    return "short.yaml"


MISSPELT = {"trainr": {"seed": 1}, "rollout": {"max_new_token": 4}, "use_rm": True, "trainer": {"backend": "megatron"}}
NAMED = ("trainer.backend=megatron", "trainr.seed", "reward.model.path", "rollout.max_new_token")
test_what_a_short_file_cannot_have_is_refused_by_name = refused(
    ("data.max_prompt_length", 8, lambda short_file: LocalPPOTrainer(short_file(), train_dataset=rows_for(9))),
    ("data.train_dataset", "token", lambda short_file: LocalPPOTrainer(short_file(), train_dataset=rows_for(pad="7"))),
    (NAMED, "megatron", lambda short_file: LocalPPOTrainer(short_file(**MISSPELT), train_dataset=ROWS)),
    ("config_path", "gone.yaml", lambda: LocalPPOTrainer("gone.yaml")),
    ("config_path", "short.yaml", lambda: LocalPPOTrainer(written("- 1\n"))),
    ("config_path", "YAML", lambda: LocalPPOTrainer(written("a: [1\n"))),
    ("'what", "KEY=VALUE", lambda short_file: LocalPPOTrainer(short_file(), ROWS, overrides=["what is this"])),
    first=3,
)
