"""Saved configurations of well-signed checkpoints that ask for code, connections, variables or files: nothing of it
happens, and the message names the value and the words by which a user would choose it."""

import dataclasses
import functools
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import exhaustive
from faults.test_hostile_input import signed_state
from trainer.runs import fit, ppo_run
from typer.testing import CliRunner

from verl.checkpoint.config import Checkpointing
from verl.cli.main import app
from verl.component import as_plain
from verl.compose.compose import compose_root
from verl.compose.load_policy import locate_policy, policy_run
from verl.compose.saved_config import allowed_config
from verl.compose.validate import validate
from verl.data.arithmetic import ArithmeticPrompts
from verl.errors import ConfigError
from verl.rewards.rules import ExactMatch

SECRET = "s3cret-value-of-a-variable"
VARIABLE = "${oc.env:VERL_TEST_SECRET}"
URL = "http://127.0.0.1:9/"  # nothing listens there
CODE, CLASS = "{evil}:score", "{evil}:Evil"


happened: list[tuple[str, Any]] = []  # what an audit hook saw while a checkpoint was opened
watching = [False]
WATCHED = (
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "os.fork",
)


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watching[0] and event in WATCHED:
        happened.append((event, arguments))


sys.addaudithook(audit)


def of(name: str, **fields: Any) -> dict[str, Any]:
    """A saved component of verl."""
    return {"_target_": f"verl.{name}", **fields}


def function(path: str, **fields: Any) -> dict[str, Any]:
    return of("rewards.function.RewardFunction", path=path, **fields)


def files(*paths: Any) -> dict[str, Any]:
    return of("data.files.PromptFiles", train_files=list(paths))


def hosted(name: str, **fields: Any) -> dict[str, Any]:
    return of(f"environments.hosted.{name}", max_turns=3, **fields)


def sums(**fields: Any) -> dict[str, Any]:
    return of("data.arithmetic.ArithmeticPrompts", digits=1, held_out=2, train_size=4, **fields)


ENDPOINT = of("http_client.endpoint.Endpoint", base_url=URL, key_variable="VERL_TEST_SECRET")
SECRET_URL = {**ENDPOINT, "base_url": URL + VARIABLE}
SECRET_HEADER = {**ENDPOINT, "headers": {"X": VARIABLE}}
EXACT = of("rewards.rules.ExactMatch")
NORMALIZED = "rewards.normalization.RewardNormalization"
MODEL = of("models.pretrained.Pretrained", path="evil/model", trust_remote_code=True)
TOOLS = hosted("PythonTools", path="{evil}")
UNPROTECTED = of("sandbox.unprotected.Unprotected")
TESTS = of("rewards.code_tests.CodeTests", sandbox=UNPROTECTED)
SCRIPTED = of("rollout.scripted.ScriptedRollout", texts=["import os"])
PLACEMENT = of("cluster.ray.ray_placement.RayPlacement", address="127.0.0.1:9", pools={"a": 1})
SERVER = of("rollout.server.config.ServerRollout", endpoint=ENDPOINT, protocol="openai", model="m")
MCP = "environments.mcp_tools.MCPTools"
DEEP = functools.reduce(lambda inner, _: of(NORMALIZED, reward=inner), range(80), EXACT)
BOMB = {f"n{level}": [f"${{n{level + 1}}}"] * 10 for level in range(12)}

# Values by configuration path, and the path that the message names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a function of a file": ({"reward": function(CODE)}, "reward.path"),
    "a function of a file with a space": ({"reward": function("{dir}/a b.py:score")}, "reward.path"),
    "a function by a variable": ({"reward": function(f"{VARIABLE}:score")}, "reward.path"),
    "a function of verl that is no reward": ({"reward": function("verl.sandbox.unprotected:os.system")}, "reward.path"),
    "a module whose name begins like verl": ({"reward": function("verl.evil:score")}, "reward.path"),
    "arguments": ({"reward": function("verl.rewards.math_rules:gsm8k_score", kwargs={"a": URL})}, "reward.kwargs"),
    "a pattern that backtracks without end": (
        {"reward": of("rewards.rules.Format", pattern="(a+)+$")},
        "reward.pattern",
    ),
    "a class of others": ({"reward": {"_target_": "evil.Evil"}}, "reward._target_"),
    "a class of the standard library": ({"reward": {"_target_": "subprocess.Popen", "args": "id"}}, "reward._target_"),
    "a class that is no component": ({"reward": of("utils.memory.os")}, "reward._target_"),
    "a class name of another type": ({"reward": {"_target_": ["evil.Evil"]}}, "reward._target_"),
    "no class": ({"reward": {"path": CODE}}, "reward is"),
    "a text in place of a component": ({"reward": "function"}, "reward is"),
    "a judge": ({"reward": of("rewards.remote.llm_judge.LLMJudge", endpoint=ENDPOINT)}, "reward._target_"),
    "a service": ({"reward": of("rewards.remote.http_reward.HTTPReward", endpoint=ENDPOINT)}, "reward._target_"),
    "a secret in a URL": ({"reward": of("rewards.remote.http_reward.HTTPReward", endpoint=SECRET_URL)}, "base_url"),
    "a reward model": ({"reward": of("rewards.reward_model.RewardModel", model=MODEL)}, "reward._target_"),
    "programs without protection": ({"reward": TESTS, "rollout": SCRIPTED}, "reward._target_"),
    "a scripted rollout": ({"rollout": SCRIPTED}, "rollout._target_"),
    "within a sum": (
        {"reward": of("rewards.weighted_sum.WeightedSum", parts={"a": function(CODE)}, weights={"a": 1.0})},
        "reward.parts.a.path",
    ),
    "within a normalisation": ({"reward": of(NORMALIZED, reward=function(CODE))}, "reward.reward.path"),
    "by a reference": (
        {"reward": of(NORMALIZED, reward="${sandbox}"), "sandbox": function(CODE)},
        "reward.reward is '${sandbox}'",
    ),
    "a reference to a variable": ({"reward": "${sandbox}", "sandbox": {**EXACT, "answer_key": VARIABLE}}, "answer_key"),
    "a component as a field": ({"reward": {**EXACT, "answer_key": function(CODE)}}, "reward.answer_key.path"),
    "an unknown field": ({"reward": {**EXACT, "command": ["touch", "{mark}"]}}, "reward.command"),
    "tools of a file": ({"environment": TOOLS}, "environment._target_"),
    "tools by a reference": (
        {"environment": {**TOOLS, "path": "${reward.path}"}, "reward": function(CODE)},
        "environment.",
    ),
    "a class of a file": ({"environment": hosted("FunctionEnvironment", path=CLASS)}, "environment._target_"),
    "an interpreter": (
        {"environment": hosted("FunctionEnvironment", path=CLASS, python="{dir}/python")},
        "environment.python",
    ),
    "a module of gymnasium": ({"environment": hosted("GymnasiumEnvironment", env_id="evil:Evil-v0")}, "evil:Evil-v0"),
    "a task set": ({"environment": hosted("VerifiersEnvironment", taskset="evil")}, "environment._target_"),
    "a task": ({"environment": hosted("ReasoningGymEnvironment", task="evil")}, "environment._target_"),
    "a game": ({"environment": hosted("TextArenaEnvironment", env_id="evil")}, "environment._target_"),
    "an agent program": (
        {"environment": of("serving.agent_program.AgentProgram", command=["touch", "{mark}"])},
        "environment._target_",
    ),
    "a command of MCP": ({"environment": of(MCP, command=["touch", "{mark}"])}, "environment._target_"),
    "a server of MCP": ({"environment": of(MCP, url=URL, headers_from_env={"X": "HOME"})}, "environment._target_"),
    "the model's programs": (
        {"environment": of("environments.python_sandbox.PythonSandbox", sandbox=UNPROTECTED)},
        "environment._target_",
    ),
    "an interpreter of a calculator": (
        {"environment": of("environments.calculator.Calculator", python="{dir}/python")},
        "environment.python",
    ),
    "a server that generates": ({"rollout": SERVER}, "rollout._target_"),
    "a secret in a header": ({"rollout": {**SERVER, "endpoint": SECRET_HEADER}}, "rollout.endpoint.headers.X"),
    "a rollout of others": ({"rollout": {"_target_": "evil.Evil"}}, "rollout._target_"),
    "data of others": ({"data": {"_target_": "evil.Evil"}}, "data._target_"),
    "rows in a bucket": ({"data": files("s3://evil/rows.jsonl")}, "data.train_files"),
    "rows of a web server": ({"data": files(f"{URL}rows.jsonl")}, "data.train_files"),
    "rows by a variable": ({"data": files(VARIABLE)}, "data.train_files.0"),
    "a component among the rows": ({"data": files(function(CODE))}, "data.train_files.0.path"),
    "a resolver of ours": ({"data": sums(seed="${processes:1,2}")}, "data.seed"),
    "a resolver within a text": ({"data": sums(seed=f"a {VARIABLE} b")}, "data.seed"),
    "a resolver within a reference": ({"data": sums(seed=f"${{trainer.{VARIABLE}}}")}, "data.seed"),
    "a resolver that evaluates": ({"data": sums(seed=f"${{oc.decode:{VARIABLE}}}")}, "data.seed"),
    "a resolver where it has no effect": ({"tracker": {"name": VARIABLE}}, "tracker.name"),
    "a resolver of the trainer": ({"trainer.device": VARIABLE}, "trainer.device"),
    "a reference to itself": ({"reward": of(NORMALIZED, reward="${reward}")}, "reward.reward is '${reward}'"),
    "references that multiply": ({**BOMB, "reward": {**EXACT, "answer_key": "${n0}"}}, "reward.answer_key is '${n0}'"),
    "components that nest without end": ({"reward": DEEP}, "nested too deeply"),
    "a kernel of the hub": ({"actor.model.attention": "evil/kernel"}, "actor.model.attention"),
    "an unknown data type": ({"actor.model.dtype": "evil"}, "actor.model.dtype"),
    "an unknown device": ({"trainer.device": "evil"}, "trainer.device"),
    "a name that a terminal interprets": ({"reward": {**EXACT, "a\x1b[31m\nb": "x"}}, r"reward.a\x1b[31m\nb"),
}

# Configuration paths whose values an evaluation does not use.
WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "a Ray address": {"trainer.placement": PLACEMENT},
    "a store": {"storage": of("storage.config.S3Storage", bucket="evil", endpoint_url=URL)},
    "a tracker": {"tracker": of("tracking.base.Trackers", more={"evil": {"_target_": "evil.Evil"}})},
    "a sandbox": {"sandbox": of("sandbox.jail.Jail", bwrap="./mine")},
    "a critic": {"critic": {"_target_": "evil.Evil"}},
    "a model": {"actor.model": {"_target_": "evil.Evil", "path": "evil/model", "revision": "evil"}},
    "a model of a module": {"actor.model": of("models.own_module.ModuleModel", path=CLASS)},
    "a tokenizer of the hub": {"actor.model.tokenizer_path": "evil/tokenizer"},
    "code of the model": {"actor.model.trust_remote_code": True},
    "an algorithm": {"algorithm": {"_target_": "evil.Evil"}},
    "a place of checkpoints": {"checkpoint": of("checkpoint.config.Checkpointing", save_dir=URL)},
    "a checkpoint to resume": {"resume": URL},
}


@pytest.fixture(scope="module")
def trained(model32, tmp_path_factory) -> Path:
    """A checkpoint of a run that needs no code of others."""
    directory = tmp_path_factory.mktemp("trained")
    saving = Checkpointing(save_dir=str(directory / "checkpoints"), save_async=False)
    data = ArithmeticPrompts(held_out=2, train_size=4, digits=1)
    run = ppo_run(model32, total_steps=1, data=data, reward=ExactMatch())
    run = dataclasses.replace(run, checkpoint=saving)
    fit(run, directory / "run")
    return directory / "checkpoints/global_step_1"


@pytest.fixture
def hostile(trained, tmp_path, monkeypatch):
    """Makes a signed copy of the checkpoint with other values in its configuration."""
    shutil.copytree(trained, tmp_path / "checkpoint", symlinks=True)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nscore = Evil = print\n")
    for name in ("a b.py", "python"):
        shutil.copy(tmp_path / "evil.py", tmp_path / name)
    monkeypatch.setenv("VERL_TEST_SECRET", SECRET)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(values: dict[str, Any]) -> Path:
        names = {"{evil}": tmp_path / "evil.py", "{dir}": tmp_path, "{mark}": tmp_path / "mark"}
        text = json.dumps(values)
        for name, path in names.items():
            text = text.replace(name, str(path))
        state = json.loads((tmp_path / "checkpoint/trainer_state.json").read_text())
        for path, value in json.loads(text).items():
            node = state["config"]
            *above, last = path.split(".")
            for key in above:
                node = node[key]
            node[last] = value
        signed_state(tmp_path / "checkpoint", json.dumps(state).encode())
        return tmp_path / "checkpoint"

    happened.clear()
    watching[0] = True
    yield make
    watching[0] = False
    assert not happened, "a process was started or a connection opened"
    assert not (tmp_path / "mark").exists(), "code of the checkpoint ran"
    assert "evil" not in sys.modules


COMMANDS = {"eval": [], "generate": ["reward=length"], "serve-policy": ["reward=length", "data.prompt_key=prompt"]}


def said_by(checkpoint: Path, overrides: Sequence[str]) -> str:
    """What a command says that composes the saved configuration; the empty text if it would run."""
    said = ""
    try:
        policy_run(locate_policy(str(checkpoint)), "ppo", overrides)
    except ConfigError as error:
        said = str(error)
    assert SECRET not in said
    assert "\x1b" not in said
    return said


@pytest.mark.first_rows(16)
@pytest.mark.parametrize("name", REFUSED)
def test_a_saved_configuration_chooses_no_code_no_server_and_no_variable(name, hostile):
    values, path = REFUSED[name]
    checkpoint = hostile(values)
    assert path in said_by(checkpoint, COMMANDS["eval"])
    if "reward" not in values:  # the other commands replace it
        assert path in said_by(checkpoint, COMMANDS["generate"])
        assert path in said_by(checkpoint, COMMANDS["serve-policy"])


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    "name", [*list(WITHOUT_EFFECT)[::3], *exhaustive(*(x for i, x in enumerate(WITHOUT_EFFECT) if i % 3))]
)
def test_a_saved_value_that_no_evaluation_needs_has_no_effect(name, hostile):
    assert said_by(hostile(WITHOUT_EFFECT[name]), COMMANDS["eval"]) == ""


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"reward": function("{evil}:score")}, ["reward.path"]),
        ({"data": {"_target_": "evil.Evil", "rows": 3}}, ["data._target_"]),
        ({"environment": TOOLS}, ["environment._target_", "environment.max_turns", "environment.path"]),
        (
            {"reward": of("rewards.remote.http_reward.HTTPReward", endpoint={**ENDPOINT, "key_variable": None})},
            ["reward._target_", "reward.endpoint._target_", "reward.endpoint.base_url"],
        ),
    ],
)
def test_the_words_of_the_message_are_what_the_user_adds(values, words, hostile):
    checkpoint = hostile(values)
    added = shlex.split(said_by(checkpoint, ()).rpartition("add: ")[2].rstrip("."))
    assert [word.partition("=")[0] for word in added] == words
    watching[0] = False  # what the user names is imported
    assert "add: " not in said_by(checkpoint, added)
    sys.modules.pop("evil", None)
    Path(checkpoint.parent / "mark").unlink(missing_ok=True)


def test_a_class_that_the_user_names_gets_nothing_else_of_the_saved_one_but_numbers(hostile):
    """Whoever names a class has not named the code, the address and the trust that the checkpoint adds to it."""
    model = of("models.pretrained.Pretrained", path="evil/model", trust_remote_code=True)
    words = ["reward._target_=verl.rewards.reward_model.RewardModel"]
    words += ["reward.model._target_=verl.models.pretrained.Pretrained"]
    said = said_by(hostile({"reward": of("rewards.reward_model.RewardModel", model=model, max_length=9)}), words)
    assert "reward.model is " in said or "reward.model." in said
    assert "reward.max_length" not in said
    said = allowed_config({"reward": model}, "ppo", dict.fromkeys(["reward._target_", "reward.path"], "verl.x.Y"), "C")
    assert any(fault.startswith("reward.trust_remote_code is True") for fault in said.faults)


def test_the_threads_of_the_training_machine_are_not_taken_over():
    saved = as_plain(validate(compose_root("ppo", ["reward=format", "trainer.num_threads=100000"])))
    found = allowed_config(saved, "ppo", {}, "CHECKPOINT")
    assert found.faults == []
    assert "num_threads" not in found.components["trainer"]
    assert "seed" in found.components["trainer"]


def test_a_file_of_a_chat_template_is_not_read_again_as_the_model_is_saved_with_what_it_held():
    for given, kept in (("/etc/passwd", None), ("chat.jinja", None), ("{{ messages }}", "{{ messages }}")):
        saved = {"data": of("data.files.PromptFiles", train_files=["rows.jsonl"], chat_template=given)}
        found = allowed_config(saved, "ppo", {"environment": None, "reward": 1, "rollout": 1}, "CHECKPOINT")
        assert (found.components["data"].get("chat_template"), found.faults) == (kept, [])


@pytest.mark.parametrize("saved", [None, [], "text", 3, {}, {"actor": 3, "trainer": [], "data": None}, {"data": {}}])
def test_a_configuration_of_another_form_is_named(saved):
    assert allowed_config(saved, "ppo", {}, "CHECKPOINT").faults


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=calculator_grpo"],
        ["experiment=guess_number_ppo"],
        ["reward=weighted_sum"],
        ["reward=math", "rollout=auto"],
        ["reward=normalized", "rollout=vllm"],
        *([f"experiment=smollm2_{name}"] for name in ("json", "largest", "length", "calculator")),
    ],
)
def test_options_without_code_or_servers_need_no_additions(overrides):
    saved = as_plain(validate(compose_root("ppo", overrides)))
    assert allowed_config(saved, "ppo", {}, "CHECKPOINT").faults == []


def test_options_that_refer_to_each_other_are_composed_together(hostile):
    saved = locate_policy(str(hostile({})))
    words = ["reward=code_tests", "reward.tests_key=answer", "sandbox=none", "sandbox.timeout_s=3"]
    assert policy_run(saved, "ppo", words).reward.sandbox.timeout_s == 3.0
    with pytest.raises(ConfigError, match="sandbox"):
        policy_run(saved, "ppo", words[:2])


def test_a_run_of_ours_is_evaluated_without_additions(hostile):
    result = CliRunner().invoke(app, ["eval", str(hostile({})), "--json"])
    assert result.exit_code == 0, result.output


def test_commands_end_with_the_message_and_status_2(hostile):
    result = CliRunner().invoke(app, ["eval", str(hostile({"environment": TOOLS}))])
    assert result.exit_code == 2
    assert "environment._target_ is 'verl.environments.hosted.PythonTools'" in result.output
