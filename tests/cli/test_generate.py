"""`verl eval` and `verl generate` ask a saved policy, wherever it lies, and tell what its own run would have told."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from trainer.runs import JSONL, PPO_ALGORITHM, Prompts, ppo_run
from trainer.test_sft import sft_run
from typer.testing import CliRunner

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import commit_line
from verl.cli.main import app
from verl.component import BuildContext
from verl.rewards.rules import ExactMatch

runner = CliRunner()
OWN = ("data._target_=trainer.runs.Prompts", "reward._target_=trainer.runs.Arbitrary")  # code that is not verl's
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]


def trained(model, directory: Path, algorithm=PPO_ALGORITHM, lora=None) -> dict:
    """The evaluation after the last of two steps."""
    run = ppo_run(model, algorithm, total_steps=2, eval_interval=1, tracker=JSONL, lr=0.02)
    run = dataclasses.replace(run, data=Prompts(eval=("5+5=", "7", "what is 6*7? ")))
    run = dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=lora))
    saving = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=1, save_async=False)
    run = dataclasses.replace(run, checkpoint=saving)
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        return trainer.fit().evaluations


@pytest.fixture(scope="module")
def run(model32, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return directory, trained(model32, directory)


def asked(command: str, *arguments) -> str:
    result = runner.invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(command: str, *arguments) -> str:
    result = runner.invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "step"), [("checkpoints", 2), ("checkpoints/latest", 2), ("run", 2), ("checkpoints/global_step_1/", 1)]
)
def test_the_numbers_are_those_that_the_run_logged_at_that_step(path, step, run):
    directory, evaluations = run
    told = json.loads(asked("eval", directory / path, *OWN, "--json"))
    assert (told["step"], told["rows"]) == (step, 3)
    assert told["metrics"].items() >= evaluations[step].items()
    assert evaluations[1] != evaluations[2]


@pytest.mark.exhaustive
def test_latest_is_the_newest_below_checkpoints_and_the_table_says_which(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no complete checkpoint below checkpoints/" in refused("eval", "latest")
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints/project/name", symlinks=True)
    told = asked("eval", "latest", *OWN)
    assert f"{tmp_path}/checkpoints/project/name/global_step_2/actor, step 2, on 3 rows" in told
    assert "eval/accuracy" in told


def test_another_file_reward_and_rollout_take_the_place_of_the_runs_own(run, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told = json.loads(
        asked(
            "eval", run[0] / "checkpoints", "--data", file, "reward=exact_match", "rollout.max_new_tokens=2", "--json"
        )
    )
    assert told["rows"] == 3
    assert 0 < told["metrics"]["eval/response_length_tokens"] <= 2
    assert told["metrics"]["eval/accuracy"] in (0.0, 1 / 3, 2 / 3, 1.0)


def test_plain_weights_are_evaluated_on_a_file_by_the_default_reward(model32, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = ("rollout.max_new_tokens=3", "trainer.eval_samples=0", "trainer.num_threads=1")
    told = json.loads(asked("eval", model32.path, "--data", file, *options, "--json"))
    assert (told["step"], told["rows"]) == (0, 3)
    assert set(told["metrics"]) == {"eval/accuracy", "eval/score", "eval/response_length_tokens"}
    assert told["settings"]["prompts"] == "by a chat template"
    assert told["settings"]["temperature"] == 1.0
    assert set(told["intervals"]) == {"eval/accuracy"}


@pytest.mark.slow
def test_weights_without_rows_of_their_own_are_evaluated_on_sums_only_if_the_command_says_so(model32):
    options = ("rollout.max_new_tokens=1", "trainer.eval_samples=0", "trainer.num_threads=1")
    for command in ("eval", "generate"):
        assert "PATH is" in refused(command, model32.path, *options)
    told = json.loads(asked("eval", model32.path, *options, "data=arithmetic", "data.held_out=4", "--json"))
    assert told["rows"] == 4
    assert told["settings"]["temperature"] == 1.25  # that of the sums


@pytest.mark.exhaustive
def test_rows_of_a_file_that_were_trained_on_are_counted_and_no_others(run, tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    texts = [*Prompts().train[:2], "9+9+9=", "9+9+9=", "8*8*8="]
    file.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    arguments = ("eval", run[0] / "checkpoints", "--data", file, "reward=exact_match", "--json")
    asked(*arguments, OWN[0])
    assert "2 of 5 evaluation rows are also training rows" in caplog.text
    assert "1 of 5 evaluation rows repeat another one" in caplog.text
    asked(*arguments)  # the data of the run is code that is not named
    assert "whether these rows were trained on is unknown" in caplog.records[-2].getMessage()
    assert "also training rows" not in caplog.records[-1].getMessage()
    caplog.clear()
    asked("generate", run[0] / "checkpoints", "--prompt", "1+1=", "--prompt", "1+1=")
    assert "rows" not in caplog.text


def test_prompts_are_answered_and_greedily_always_the_same(run):
    ask = ("generate", run[0] / "checkpoints", "--prompt", "5+5=", "--prompt", "1", "--max-new-tokens", "4")
    ask = (*ask, "--json")
    rows = [json.loads(line) for line in asked(*ask, "--greedy").splitlines()]
    assert [row["prompt"] for row in rows] == ["5+5=", "1"]
    assert all(0 < row["tokens"] <= 4 for row in rows)
    assert rows == [json.loads(line) for line in asked(*ask, "--greedy").splitlines()]
    drawn = [json.loads(line)["response"] for line in asked(*ask, "--samples", "3").splitlines()]
    assert len(drawn) == 6
    assert len(set(drawn)) > 2


def test_a_damaged_policy_is_named_and_not_asked(run, tmp_path):
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    file = tmp_path / "checkpoints/global_step_2/actor/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    said = refused("eval", tmp_path / "checkpoints/global_step_2", *OWN)
    assert "actor/model.safetensors: bytes" in said
    assert "are not those that were written (in actor/" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "PATH is 'absent': no such directory. Give a checkpoint, a run, or a directory of a model."),
        (["{run}", *OWN, "rollout.temprature=1"], "rollout.temprature is not a known key"),
        (["{run}", *OWN, "data.eval=[]"], "the run has no evaluation data. Give --data FILE"),
    ],
)
def test_a_question_that_cannot_be_answered_is_told_by_its_path(arguments, said, run):
    assert said in refused("eval", *(text.format(run=run[0] / "run") for text in arguments))


def test_the_default_reward_of_plain_weights_is_the_one_of_the_default_run(model32):
    from verl.compose.load_policy import locate_policy, policy_run

    described = policy_run(locate_policy(model32.path), "ppo", ["data=arithmetic"])
    assert isinstance(described.reward, ExactMatch)
    assert described.critic is None
    assert described.checkpoint is None


@pytest.mark.exhaustive
def test_a_fine_tuned_policy_is_evaluated_on_its_own_held_out_text_and_answers(dir32, tmp_path):
    described = sft_run(dir32, tmp_path)
    saving = Checkpointing(save_dir=str(tmp_path / "checkpoints"), save_async=False)
    described = dataclasses.replace(described, checkpoint=saving)
    with described.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        evaluations = trainer.fit().evaluations
    told = json.loads(asked("eval", tmp_path / "checkpoints", "--json"))
    assert told["metrics"] == evaluations[told["step"]]
    assert "'SFTRoot'" in refused("eval", tmp_path / "checkpoints", "data=arithmetic")
    said = asked("generate", tmp_path / "run", "--prompt", "5+1=", "--max-new-tokens", "3", "trainer.num_threads=1")
    prompt, response = said.splitlines()
    assert "5+1=" in prompt
    assert response.startswith("  -> ")


EVIL = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import Qwen2Config, Qwen2ForCausalLM


def score(prompts, responses):
    return [1.0] * len(responses)


class Evil(Qwen2Config):
    model_type = "evil"


class EvilModel(Qwen2ForCausalLM):
    config_class = Evil
"""


@pytest.fixture
def hostile(run, tmp_path) -> tuple[Path, Path]:
    """A well-signed checkpoint that brings Python and asks for it in every way; and what that Python leaves behind."""
    checkpoint, mark = tmp_path / "checkpoints/global_step_2", tmp_path / "ran"
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    (checkpoint / "actor/evil.py").write_text(EVIL.format(mark=str(mark)))
    model = json.loads((checkpoint / "actor/config.json").read_text())
    named = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.EvilModel"}
    (checkpoint / "actor/config.json").unlink()
    (checkpoint / "actor/config.json").write_text(json.dumps({**model, "model_type": "evil", "auto_map": named}))
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["config"]["actor"]["model"]["trust_remote_code"] = True
    rate = f"{checkpoint}/actor/evil.py:score"
    state["config"]["reward"] = {"_target_": "verl.rewards.function.RewardFunction", "path": rate}
    state["config"]["data"]["_target_"] = "evil.Evil"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "trainer_state.json").unlink()
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    own = ("actor/config.json", "trainer_state.json", "actor/evil.py")
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] not in own]
    for path in own:
        data = (checkpoint / path).read_bytes()
        digest = digest_of(data)
        manifest["files"].append({"path": path, "size": len(data), "blake3": digest, "leaves": [[len(data), digest]]})
    data = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(data)
    (checkpoint / "COMMIT").write_bytes(commit_line(data))
    return checkpoint, mark


@pytest.mark.slow
def test_python_that_lies_in_a_checkpoint_runs_where_the_command_names_it_and_nowhere_else(hostile, monkeypatch):
    checkpoint, mark = hostile
    monkeypatch.chdir(checkpoint / "actor")
    monkeypatch.syspath_prepend(str(checkpoint / "actor"))
    said = refused("eval", checkpoint)
    assert f"reward.path is '{checkpoint}/actor/evil.py:score': the saved configuration of" in said
    assert "If you trust it, add: 'data._target_=evil.Evil'." in said
    for arguments in (
        ["generate", checkpoint, "--prompt", "1"],
        ["eval", checkpoint, "reward=length", "data=arithmetic"],
    ):
        result = runner.invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 2, result.output
        assert "trust_remote_code" in result.stderr
        assert not mark.exists()
    runner.invoke(app, ["generate", str(checkpoint), "--prompt", "1", "actor.model.trust_remote_code=true"])
    assert mark.exists()
