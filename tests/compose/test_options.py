"""Every option of every group and every experiment composes, passes the check, and says what it is for."""

import hashlib
import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import each_value_once, short_where
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from refusals import refusal

from verl.component import BuildContext, as_plain, field_types
from verl.compose import schema
from verl.compose.component_import import import_component
from verl.compose.compose import compose_root
from verl.compose.explain import explained
from verl.compose.overrides import command_line
from verl.compose.schema import ROOTS, conf_dir, group_options, root_keys
from verl.compose.validate import refuse_here, validate
from verl.errors import ConfigError

SFT_ONLY = {f"data={name}_sft" for name in ("arithmetic", "calculator", "guess_number", "chat_task", "shapes")}
SFT_ONLY |= {"data=sft_files", "trainer=sft", "trainer=sft_ray"}
PPO_ONLY = {f"data={name}" for name in ("arithmetic", "calculator", "guess_number", "chat_task", "shapes", "episodes")}
PPO_ONLY |= {"data=files", "data=hub", "trainer=local", "trainer=ray", "trainer=mesh"}
SMOLLM2 = [f"experiment=smollm2_{name}" for name in ("json", "largest", "length", "reverse", "calculator")]
SMOLLM2_TOO = ("actor=smollm2_135m", "experiment=smollm2_reverse_sft", "experiment=smollm2_calculator_sft")
DPO_ONLY = {"trainer=dpo", "trainer=dpo_ray", "reference=precomputed"}
DPO_ONLY |= {f"loss={name}" for name in ("sigmoid", "ipo", "kto", "orpo", "simpo")}
REWARD_MODEL_ONLY = {"trainer=reward_model", "trainer=reward_model_ray", "loss=bradley_terry"}
OWNERS = [  # options, and the roots that they are for; others are for every root that has their group
    (SFT_ONLY, ["sft"]),
    (PPO_ONLY, ["ppo"]),
    (DPO_ONLY, ["dpo"]),
    (REWARD_MODEL_ONLY, ["reward_model"]),
    ({"data=arithmetic_preferences", "data=preference_files"}, ["dpo", "reward_model"]),
]
OPTIONS = [f"{group}={option}" for group, options in group_options().items() for option in options]
OPTIONAL = {  # an option that asks for a package, and the extra of setup.py that brings it
    "tracker=wandb": ("wandb", "wandb"),
    "reward=math": ("math_verify", "math"),
    "storage=s3": ("obstore", "s3"),
}
NEEDED = {  # what an option leaves to the user
    "actor=pretrained": ["actor.model.path=owner/model"],
    **{key: ["actor.model.path=owner/model", "actor.autocast=null"] for key in (*SMOLLM2, *SMOLLM2_TOO)},
    "data=chat_task_sft": ["data.max_length=64"],
    "critic=own_model": ["critic.model.path=owner/model"],
    "critic=none": ["algorithm=grpo"],
    "reference=none": ["algorithm.kl.coef=0"],
    "reference=teacher": ["reference.model.path=owner/model"],
    "algorithm=distill": ["reference=teacher", "reference.model.path=owner/model"],
    "reward=function": ["reward.path=rule.py:score"],
    "reward=model": ["reward.model.path=owner/model"],
    "reward=remote_chat": ["reward.endpoint.base_url=http://localhost:8000/v1", "reward.model=judge"],
    "reward=remote_http": ["reward.endpoint.base_url=http://localhost:9000/score"],
    "reward=code_tests": ["sandbox=none", "reward.tests_key=answer"],
    "sharding=hsdp": ["trainer.n_gpus_per_node=4"],
    "sharding=cp": ["trainer.n_gpus_per_node=2"],
    "sharding=pp": ["trainer.n_gpus_per_node=2"],
    "sharding=tp_fsdp": ["trainer.n_gpus_per_node=4"],
    "storage=s3": ["storage.bucket=models"],
    "storage=gcs": ["storage.bucket=models"],
    "storage=oss": ["storage.bucket=models", "storage.endpoint_url=https://oss-cn-hangzhou.aliyuncs.com"],
    "reward=environment": ["environment=guess_number", "data=guess_number"],
    "environment=guess_number": ["reward=environment", "data=guess_number"],
    "data=guess_number": ["reward=environment", "environment=guess_number"],
    "data=episodes": ["reward=environment", "environment=function", "environment.path=rule.py:World"],
    "environment=function": ["environment.path=rule.py:World"],
    "environment=agent_program": ["environment.path=rule.py:World"],
    "environment=python_tools": ["environment.path=rule.py"],
    "environment=python_sandbox": ["sandbox=none"],
    "environment=gymnasium": ["environment.env_id=FrozenLake-v1"],
    "environment=textarena": ["environment.env_id=GuessTheNumber-v0"],
    "environment=verifiers": ["environment.taskset=my_tasks"],
    "environment=reasoning_gym": ["environment.task=leg_counting"],
    "environment=mcp": ["environment.command=[server]"],
    "rollout=server": ["rollout.endpoint.base_url=http://localhost:8000"],
    "data=files": ["data.train_files=[rows.jsonl]", "data.max_prompt_length=16"],
    "data=hub": ["data.dataset=me/sums", "data.max_prompt_length=16"],
    "data=sft_files": ["data.train_files=[rows.jsonl]", "data.max_length=16"],
    "data=preference_files": ["data.train_files=[rows.jsonl]", "data.max_length=16"],
}
COMBINATIONS = [  # that go together: `make test` composes these, and `make exhaustive` each option alone
    "reward=code_tests algorithm=cispo environment=agent_program critic=llama1b tracker=console sharding=cp "
    "actor=llama1b data=arithmetic rollout=auto checkpoint=async sandbox=none storage=local trainer=local "
    "reference=none replay=off sweep=saving",
    "reward=environment algorithm=dr_grpo critic=llama8b sharding=ddp actor=llama8b rollout=hf "
    "checkpoint=incremental sandbox=jail storage=none trainer=mesh reference=same_as_actor",
    "reward=exact_match algorithm=dapo critic=own_model tracker=default sharding=fsdp actor=pretrained "
    "data=calculator rollout=scripted checkpoint=off sandbox=jail storage=s3 trainer=ray replay=tiered "
    "sweep=sharding_checkpoint",
    "reward=format algorithm=grpo environment=calculator critic=none tracker=jsonl sharding=hsdp actor=qwen2_0_5b "
    "data=files rollout=server checkpoint=sync",
    "reward=function algorithm=gspo environment=function critic=pretrained sharding=none actor=qwen3_1_7b rollout=vllm",
    "reward=length algorithm=opo environment=gymnasium critic=qwen2_0_5b tracker=none sharding=parallel actor=tiny",
    "reward=math algorithm=ppo environment=mcp critic=qwen3_1_7b tracker=report sharding=pp",
    "reward=model algorithm=ppo_adaptive_kl environment=none critic=same_as_actor tracker=tensorboard sharding=tp "
    "actor=tiny_scratch",
    "reward=normalized algorithm=reinforce_pp environment=python_sandbox critic=tiny sharding=tp_fsdp",
    "reward=overlong algorithm=reinforce_pp_baseline environment=python_tools critic=tiny_scratch tracker=wandb",
    "reward=remote_chat algorithm=remax data=hub",
    "reward=remote_http algorithm=rloo environment=reasoning_gym",
    "reward=weighted_sum environment=textarena",
    "environment=guess_number data=guess_number",
    "actor=smollm2_135m critic=smollm2_135m data=chat_task",
    "actor=tiny_images critic=tiny_images data=shapes",
]


IDENTITIES = json.loads((Path(__file__).parents[1] / "golden/identities.json").read_text())
"""Of every shipped configuration, by root and options; scripts/record_identities.py records them."""
COMPOSITIONS = json.loads((Path(__file__).parents[1] / "golden/compositions.json").read_text())
"""Of the same, a digest of all values and references, and all of them for those `WRITTEN_OUT`."""
WRITTEN_OUT = ("ppo experiment=arithmetic_grpo", "sft experiment=arithmetic_sft")


def unresolved(config) -> dict:
    """All values and references of a configuration; a whole number is one of floats."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {str(key): plain(item) for key, item in sorted(node.items(), key=lambda pair: str(pair[0]))}
        if isinstance(node, list):
            return [plain(item) for item in node]
        return float(node) if type(node) is int else node

    return plain(OmegaConf.to_container(config, resolve=False))


def digest(config) -> str:
    return hashlib.blake2b(json.dumps(unresolved(config)).encode(), digest_size=8).hexdigest()


def roots_of(option: str) -> list[str]:
    """The roots that an option is for, the first of them the one that it is tried in."""
    if option.startswith("experiment="):
        text = (conf_dir() / f"{option.replace('=', '/')}.yaml").read_text()
        return [re.findall(r"^# Command: .*\bverl (\S+) experiment=", text, re.MULTILINE)[0].replace("-", "_")]
    return next((roots for options, roots in OWNERS if option in options), list(ROOTS))


def applies(root: str, option: str) -> bool:
    if root != "ppo" and option in {"storage=oss", "storage=gcs", "reference=none"}:  # the same in each root
        return False
    return root in roots_of(option) and option.split("=")[0] in root_keys(root)


def write_users_files() -> None:
    """The files that the options in NEEDED name, into the working directory."""
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    Path("rule.py").write_text("def score(prompts, responses):\n    return [0.0] * len(prompts)\n")


@pytest.fixture
def users_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_users_files()


def words_of(options: str) -> list[str]:
    """Options with what they need, each word once."""
    return list(dict.fromkeys(word for option in options.split() for word in (option, *NEEDED.get(option, []))))


def is_alone(option: str) -> bool:
    """Whether no other test of `make test` composes an option of ppo."""
    together = {option for options in COMBINATIONS for option in options.split()}
    return option not in together and not option.startswith(("experiment=", "debug="))


def is_composed_and_checked_as_recorded(root: str, words: list[str], key: str) -> None:
    arguments, assigned = command_line(root, words)
    assert assigned.faults == []
    config = compose_root(root, arguments)
    run = validate(config)
    kind = ROOTS[root].run.rpartition(".")[2]
    assert (type(run).__name__, run.identity()) == (kind, IDENTITIES[f"{root} {key}"])
    assert COMPOSITIONS[f"{root} {key}"] in (digest(config), unresolved(config))


@pytest.mark.slow
@pytest.mark.parametrize("options", [*COMBINATIONS, *short_where(filter(partial(applies, "ppo"), OPTIONS), is_alone)])
def test_options_compose_and_check_in_ppo(options, users_files):
    is_composed_and_checked_as_recorded("ppo", words_of(options), options)


def is_first_or_of_sft_alone(option: str) -> bool:
    """An option of both roots is tried in ppo; in sft the first of its group stands for it."""
    group = option.partition("=")[0]
    return roots_of(option) == ["sft"] or option == next(
        o for o in OPTIONS if o.startswith(f"{group}=") and applies("sft", o)
    )


OTHERS = [
    *short_where([("sft", o) for o in OPTIONS if applies("sft", o)], lambda case: is_first_or_of_sft_alone(case[1])),
    *short_where(
        [(root, o) for root in ("dpo", "reward_model") for o in OPTIONS if applies(root, o)],
        lambda case: len(roots_of(case[1])) < len(ROOTS),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_option_composes_and_checks_in_the_other_roots(case, users_files):
    root, option = case
    is_composed_and_checked_as_recorded(root, words_of(option), option)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("debug", "experiment"), each_value_once(*(group_options()[group] for group in ("debug", "experiment")))
)
def test_debug_goes_with_every_experiment(experiment, debug, users_files):
    root, option = roots_of(f"experiment={experiment}")[0], f"experiment={experiment}"
    words = [option, f"debug={debug}", *NEEDED.get(option, [])]
    is_composed_and_checked_as_recorded(root, words, f"{option} debug={debug}")


@pytest.mark.parametrize("experiment", group_options()["experiment"])
def test_experiment_opens_with_purpose_command_and_expected_result(experiment):
    lines = (conf_dir() / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert [line.split(":")[0] for line in lines[1:4]] == ["# Purpose", "# Command", "# Expected"]
    assert f"experiment={experiment}" in lines[2]


def test_files_of_options_name_no_value_that_is_the_default_of_its_class():
    """What a file repeats would hide a new default of the class."""

    def repeated(node, path):
        defaults = {}
        if isinstance(kind := import_component(str(node.get("_target_"))), type):
            defaults = as_plain({name: getattr(kind, name) for name in field_types(kind) if hasattr(kind, name)})
        for key, value in node.items():
            if key in defaults and value == defaults[key] and type(value) is type(defaults[key]):
                yield f"{path}.{key}"
            elif isinstance(value, dict):
                yield from repeated(value, f"{path}.{key}")

    files = [file for file in conf_dir().rglob("*.yaml") if "\ndefaults:" not in file.read_text()]
    found = [path for file in files for path in repeated(yaml.safe_load(file.read_text()), file.stem)]
    assert found == []


@pytest.mark.parametrize("root", ROOTS)
def test_a_composed_configuration_has_every_field_and_is_printed_with_a_sentence_for_each(root):
    config = compose_root(root)
    tree = OmegaConf.to_container(config, resolve=False)
    text = explained(config)
    assert yaml.safe_load(text) == tree
    lines = {line.strip().partition(":")[0]: line for line in text.splitlines()}
    assert "# peak learning rate" in lines["lr"]
    for kind, node in components_of(tree):
        assert field_types(kind).keys() - {kind.other_keys, *OF_OTHER_ROOTS} <= node.keys(), kind


OF_OTHER_ROOTS = ("reference",)  # a field of `RewardModelRun` that it inherits


def components_of(node):
    if isinstance(node, dict):
        if isinstance(kind := import_component(str(node.get("_target_"))), type):
            yield kind, node
        for item in node.values():
            yield from components_of(item)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["trainer.stop_after=3"], "trainer.stop_after", 3),  # named by no file
        (["+actor.lora={_target_:verl.models.lora.LoRA,rank:4}"], "actor.lora.alpha", 16.0),
        (["+actor.lora.rank=4"], "actor.lora._target_", "verl.models.lora.LoRA"),  # the one component that can be there
        (["trainer.seed=${rollout.top_k}"], "trainer.seed", 0),  # a reference to a field that no file names
        (["trainer={safety:{max_skips:7}}"], "trainer.safety.max_skips", 7),
        (["trainer.safety={max_skips:7}"], "trainer.safety.max_dumps", 10),
        (["~trainer.save_final"], "trainer.save_final", True),
        (["algorithm=dr_grpo"], "algorithm.policy_loss._target_", "verl.algorithms.losses.PPOClip"),
        (["algorithm=cispo"], "algorithm.policy_loss.clip_high", 4.0),
        (["data=files"], "data.truncation", "error"),
        (["reward=function"], "reward.timeout_s", None),
    ],
)
def test_a_field_that_no_file_names_has_the_default_of_its_class(words, path, value):
    assert OmegaConf.select(compose_root("ppo", words), path) == value


def test_hydras_own_grammar_finds_fields_that_no_file_names(tmp_path):
    schema.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("ppo", ["trainer.stop_after=3", "checkpoint.save_interval=7"], return_hydra_config=True)
        config.hydra.run.dir = "${trainer.project_name}/${trainer.seed}"
        assert (config.hydra.run.dir, config.trainer.stop_after, config.checkpoint.save_interval) == ("verl/0", 3, 7)
        with pytest.raises(ConfigCompositionException):
            compose("ppo", ["trainer.stop_aftr=3"])


def test_the_critic_follows_the_actor_unless_one_is_chosen():
    assert compose_root("ppo", ["actor=llama8b"]).critic.optimizer.lr is None  # by its size
    assert compose_root("ppo", ["actor=tiny"]).critic.optimizer.lr == 2e-3
    assert compose_root("ppo", ["actor=llama8b", "critic=tiny"]).critic.optimizer.lr == 2e-3
    assert compose_root("ppo", ["actor=llama8b", "critic=none"]).critic is None


def test_a_forgotten_package_line_and_an_unknown_root_key_in_an_experiment_are_rejected(tmp_path):
    kept = "# @package _global_\ntrainer:\n  seed: 5\n"
    for name, text in {"kept": kept, "forgotten": kept.partition("\n")[2], "odd": kept.replace("er:", "r:")}.items():
        file = tmp_path / "experiment" / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        words = [f"experiment={name}", f"hydra.searchpath=[file://{tmp_path}]"]
        if name == "kept":
            assert compose_root("ppo", words).trainer.seed == 5
        else:
            with pytest.raises(ConfigCompositionException, match="experiment|odd"):
                compose_root("ppo", words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "ppo_tiny"),
        (["algorithm=grpo"], "grpo_tiny"),
        (["algorithm=dapo"], "dapo_tiny"),
        (["algorithm=gspo", "actor=qwen2_0_5b"], "gspo_qwen2-0.5b-instruct"),
        (["algorithm=reinforce_pp_baseline", "actor=tiny_scratch"], "reinforce_pp_baseline_tiny"),
        (["actor=pretrained", "++actor.model.path='/data/My Models/a,b/'"], "ppo_a-b"),
        (["actor=pretrained"], "ppo_pretrained"),
        (["++trainer.experiment_name=mine"], "mine"),
        (["experiment=arithmetic_grpo"], "arithmetic_grpo"),
    ],
)
def test_an_experiment_without_a_name_has_that_of_its_algorithm_and_model(overrides, name):
    assert compose_root("ppo", overrides).trainer.experiment_name == name


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONAL)
def test_an_option_names_the_extra_that_brings_what_it_needs_and_is_not_installed(option, users_files, monkeypatch):
    package, extra = OPTIONAL[option]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, of=None: None if name == package else find(name, of))
    arguments, assigned = command_line("ppo", [option, *NEEDED.get(option, [])])
    with pytest.raises(ConfigError, match=re.escape(f'pip install "verl[{extra}]"')):
        refuse_here(validate(compose_root("ppo", arguments), assigned.faults))
    refuse_here(validate(compose_root("ppo")))  # which does not ask for it


def test_the_default_trackers_do_without_what_is_not_installed_and_say_so(tmp_path, monkeypatch, caplog):
    find, package = importlib.util.find_spec, "tensorboard"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, of=None: None if name == package else find(name, of))
    run = validate(compose_root("ppo"))
    refuse_here(run)
    with caplog.at_level("INFO"):
        trackers = run.tracker.build(BuildContext(run_dir=tmp_path))
    trackers.start("run", {}, tmp_path, 1)
    trackers.close("finished")
    assert 'pip install "verl[tensorboard]"' in caplog.text
    asked = validate(compose_root("ppo", command_line("ppo", ["tracker=[console,tensorboard]"])[0]))
    with refusal("tracker.tensorboard", value=package):
        refuse_here(asked)


def test_a_default_length_is_at_most_what_the_model_holds(tmp_path):
    from verl.compose.compose import compose_root

    def lengths(root, data, *more):
        return compose_root(root, [f"data={data}", "data.train_files=[rows.jsonl]", *more]).data.max_length

    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    own = ["actor=pretrained", f"actor.model.path={tmp_path}"]
    assert lengths("sft", "sft_files", "actor=tiny_scratch") == 63
    assert lengths("sft", "sft_files", "actor=tiny_scratch", "data.max_length=64") == 64
    assert lengths("sft", "sft_files", *own) == 99
    assert lengths("sft", "sft_files", "actor=pretrained", "actor.model.path=somebody/model") == 512
    assert lengths("dpo", "preference_files", *own) == 99
