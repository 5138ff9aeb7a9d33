"""Plain flags: what each becomes, what is refused, and that the run they ask for is the one that runs."""

import importlib.util
import json
import re
import shlex
import sys

import pytest
from cases import short_where

from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.schema import conf_dir
from verl.compose.validate import validate

ROOT = conf_dir().parent
spec = importlib.util.spec_from_file_location("train", ROOT / "scripts" / "train.py")
train = importlib.util.module_from_spec(spec)
sys.modules["train"] = train  # dataclasses look their module up
spec.loader.exec_module(train)

VALUES = {
    "experiment": "arithmetic_grpo",
    "actor": "tiny",
    "critic_model": "owner/critic",
    "algorithm": "grpo",
    "train_files": "rows.jsonl",
    "eval_files": "rows.jsonl",
    "reward_function": "rule.py:score",
    "fsdp_sharding_strategy": "NO_SHARD",
    "num_nodes": "1",
    "prompts_per_step": "8",
    "save_best": "eval/accuracy",
}
GIVEN = train.FLAGS

COMPOSED = {"actor", "num_gpus", "train_files", "buffer_warmup_steps"}  # one of each kind; the others in exhaustive


def told(capsys, *arguments):
    """The assignments that the flags become."""
    train.main([*arguments, "--dry_run"])
    program, script, *overrides = shlex.split(capsys.readouterr().out)
    assert (program, script) == ("python", "main_ppo.py")
    return overrides


@pytest.fixture
def users_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "rule.py").write_text("def score(prompts, responses):\n    return [0.0] * len(prompts)\n")


def assignments_of_flag(name, capsys):
    """What a flag becomes with a value of its kind, once the command line of a run has judged it."""
    number = re.search("rank|lr=|steps|size|epochs|seed|length|tokens|temperature|node|interval|_n=|limit", GIVEN[name])
    value = VALUES.get(name, "8" if number else "owner/name")
    flag = [f"--{name}", value] if "VALUE" in GIVEN[name] else [f"--{name}"]
    if name in ("train_files", "eval_files"):
        flag += ["--train_files", "rows.jsonl", "--max_prompt_length", "16"]
    if name == "buffer_warmup_steps":
        flag += ["replay=tiered"]
    overrides = told(capsys, *flag)
    assert overrides
    arguments, assigned = command_line("ppo", [part for part in overrides if not part.startswith("hydra.")])
    assert (assigned.faults, assigned.notes) == ([], [])
    return arguments


@pytest.mark.parametrize("name", GIVEN)
def test_every_flag_becomes_assignments_of_known_keys(name, capsys, users_files):
    assignments_of_flag(name, capsys)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("name", short_where(GIVEN, COMPOSED.__contains__))
def test_every_flag_becomes_assignments_that_compose_and_pass_the_check(name, capsys, users_files):
    validate(compose_root("ppo", assignments_of_flag(name, capsys)))


def test_flags_become_assignments_in_our_spelling(capsys):
    overrides = told(
        capsys,
        *("--model", "./m", "--train_files", "a.jsonl", "b c.jsonl", "rollout.top_p=0.9", "--num-gpus", "2"),
        *("--reward_function", "my.py:reward", "--lora_rank", "8", "--wandb", "--output_dir", "out/x"),
    )
    assert sorted(overrides) == [
        "actor.lora.rank=8",
        "actor.model.path=./m",
        "actor=pretrained",
        "data.train_files=[a.jsonl,'b c.jsonl']",
        "data=files",
        "hydra.run.dir=out/x",
        "reward.path=my.py:reward",
        "reward=function",
        "rollout.top_p=0.9",
        "sharding=ddp",
        "tracker=[default,wandb]",
        "trainer.n_gpus_per_node=2",
    ]


def test_flags_of_checkpoints_become_settings_of_checkpoints(capsys):
    overrides = told(
        capsys,
        *("--resume_from_checkpoint", "runs/a b", "--save_dir", "kept", "--save-interval", "50", "--keep_last_n", "5"),
        *("--save_best", "eval/accuracy", "--save_sync", "--time_limit_s", "3600"),
    )
    assert sorted(overrides) == [
        "checkpoint.keep_last_n=5",
        "checkpoint.save_best=eval/accuracy",
        "checkpoint.save_dir=kept",
        "checkpoint.save_interval=50",
        "checkpoint.time_limit_s=3600",
        "checkpoint=sync",
        "resume='runs/a b'",
    ]


def test_a_model_beside_an_experiment_keeps_the_rates_that_the_experiment_chose(capsys):
    overrides = told(capsys, "--experiment", "gsm8k_qwen2_5_0_5b", "--model", "./m")
    assert sorted(overrides) == ["actor.model.path=./m", "experiment=gsm8k_qwen2_5_0_5b"]


STRATEGIES = {
    "FULL_SHARD": ["sharding=fsdp"],
    "HYBRID_SHARD": ["sharding=hsdp"],
    "SHARD_GRAD_OP": ["sharding.strategy=SHARD_GRAD_OP", "sharding=fsdp"],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_of_sharding_chooses_the_sharding_of_several_processes(strategy, capsys):
    overrides = told(capsys, "--num_gpus", "4", "--fsdp_sharding_strategy", strategy)
    assert sorted(overrides) == [*STRATEGIES[strategy], "trainer.n_gpus_per_node=4"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--learning_rat 1", "unknown: --learning_rat 1; a flag of the list in --help, or KEY=VALUE, is expected")],
)
def test_wrong_flags_are_told_by_their_names(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(flags.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_tells_every_flag_and_an_example(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = capsys.readouterr().out
    assert [name for name in train.FLAGS if f"--{name}" not in said] == []
    assert "python scripts/train.py --algorithm grpo --total_steps 50" in said


@pytest.mark.exhaustive
def test_the_run_that_the_flags_ask_for_is_the_one_that_runs(tmp_path, dir32, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])  # which Hydra reads
    flags = ["--model", str(dir32), "--algorithm", "grpo", "--prompts_per_step", "2", "--total_steps", "1"]
    train.main([*flags, "--output_dir", str(tmp_path / "run"), "data.held_out=8", "trainer.num_threads=1"])
    assert capfd.readouterr().out.startswith("python main_ppo.py ")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1


def test_faults_of_the_run_end_the_script_with_status_2(fork_server, tmp_path):
    done = fork_server.run([ROOT / "scripts" / "train.py", "--seed", "-1"], tmp_path)
    assert (done.returncode, done.stderr) == (2, "trainer.seed is -1: input should be greater than or equal to 0.\n")
    assert done.stdout == "python main_ppo.py trainer.seed=-1\n"
