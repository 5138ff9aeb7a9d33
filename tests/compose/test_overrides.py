"""What a user assigns, in our spelling and in other people's."""

from __future__ import annotations

import re

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from verl.compose.command_line import command_line
from verl.compose.compose import _compose, _composition, apply_values, compose_root
from verl.compose.overrides import ALIASES, Overrides, assign, flatten
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.errors import ConfigError


def test_a_plain_value_is_forced_so_that_our_own_check_sees_it():
    arguments, assigned = command_line("ppo", ["trainer.lr=1", "algorithm=grpo", "+rollout.x=2"])
    assert arguments == ["algorithm=grpo", "++trainer.lr=1", "++rollout.x=2"]
    assert assigned.faults == assigned.notes == []


@pytest.mark.parametrize(
    "argument", ["-m", "--cfg job", "hydra.verbose=true", "~critic", "hydra/launcher=basic", "data@held=files"]
)
def test_what_is_meant_for_hydra_passes_as_it_is(argument):
    assert command_line("ppo", argument.split()) == (argument.split(), Overrides(is_sweep=argument == "-m"))


def test_a_sweep_over_options_passes_and_each_is_known():
    assert command_line("ppo", ["-m", "algorithm=ppo,grpo", "trainer.seed=0,1"])[0] == [
        "-m",
        "algorithm=ppo,grpo",
        "++trainer.seed=0,1",
    ]
    assert command_line("ppo", ["-m", "algorithm=ppo,gropo"])[1].faults[0].endswith("Did you mean grpo?")


def test_an_unknown_root_key_is_told_with_the_nearest():
    for given in ("trainr", "trainr.seed"):
        assert command_line("ppo", [f"{given}=local"])[1].faults == [
            f"{given} is not a known key: ppo.yaml has no trainr. Did you mean trainer?"
        ]
    assert command_line("sft", ["algorithm=grpo"])[1].faults == [
        "algorithm is not a known key: sft.yaml has no algorithm."
    ]


def test_groups_are_also_looked_for_in_the_directories_of_the_user(tmp_path):
    with pytest.raises(ConfigError, match="--config-dir is mine: no such directory"):
        command_line("ppo", ["--config-dir=mine", "actor=my_actor"])
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/my_actor.yaml").write_text("defaults: [tiny]\n")
    for argument in (f"--config-dir={tmp_path}", f"--config-path={tmp_path}", f"hydra.searchpath=[file://{tmp_path}]"):
        arguments, assigned = command_line("ppo", [argument, "actor=my_actor", "--config-name=my_run"])
        assert not assigned.faults
        assert "actor=my_actor" in arguments
    assert command_line("ppo", ["actor=my_actor"])[1].faults


@pytest.mark.parametrize(
    ("given", "became"),
    [
        ("data.train_batch_size=8", ["++trainer.prompts_per_step=8"]),
        ("data.max_response_length=8", ["++rollout.max_new_tokens=8"]),
        ("actor_rollout.model_name_or_path=D", ["actor=pretrained", "++actor.model.path=D"]),
        ("critic.model_name_or_path=D", ["critic=own_model", "++critic.model.path=D"]),
        ("algorithm.adv_estimator=grpo", ["algorithm=grpo"]),
        ("algorithm.adv_estimator=reinforce_plus_plus", ["algorithm=reinforce_pp"]),
        ("trainer.backend=ddp", ["sharding=ddp"]),
        ("trainer.backend=fsdp2", ["sharding=fsdp"]),
        ("ray.address=auto", ["trainer=ray", "++trainer.placement.address=auto"]),
        ("actor_rollout.fsdp_config.sharding_strategy=NO_SHARD", ["sharding=none"]),
        ("actor_rollout.fsdp_config.sharding_strategy=FULL_SHARD", ["sharding=fsdp"]),
        ("actor_rollout.fsdp_config.cpu_offload=false", []),
        ("actor_rollout.use_vllm=False", []),
        ("use_vllm=true", ["rollout=vllm"]),
        ("trainer.save_freq=-1", ["++checkpoint.save_interval=null"]),
        ("use_critic=false", ["critic=none"]),
        ("use_reference_policy=false", ["reference=none"]),
        ("use_rm=false", []),
        ("use_rm=true", ["reward=model"]),
        ("reward_model.model_name_or_path=D", ["reward=model", "++reward.model.path=D"]),
        ("data.train_files=[a.jsonl]", ["data=files", "++data.train_files=[a.jsonl]"]),
    ],
)
def test_an_alias_becomes_our_spelling_and_is_reported(given, became):
    arguments, assigned = command_line("ppo", [given])
    assert arguments == became
    assert assigned.faults == []
    assert assigned.notes[0].startswith(given.split("=")[0])


def test_an_alias_does_not_choose_again_what_is_chosen_by_name():
    arguments, assigned = command_line("ppo", ["actor=llama1b", "actor_rollout.model_name_or_path=D"])
    assert arguments == ["actor=llama1b", "++actor.model.path=D"]
    assert assigned.faults == []


def test_files_of_sft_are_no_prompts():
    assert command_line("sft", ["data.train_files=[a.jsonl]"])[0][0] == "data=sft_files"


def test_two_spellings_that_contradict_each_other_are_a_fault():
    (fault,) = command_line("ppo", ["trainer.backend=local", "sharding=ddp"])[1].faults
    assert "sharding=none" in fault
    assert "sharding=ddp" in fault


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ("storage.type=ftp", "storage"),
        ("trainer.backend=megatron", "sharding"),
        ("algorithm.adv_estimator=vine", "estimator"),
    ],
)
def test_what_this_version_lacks_is_refused_by_name(given, needs):
    arguments, assigned = command_line("ppo", [given])
    (fault,) = assigned.faults
    assert fault.startswith(given.lstrip("+"))
    assert needs in fault
    assert "this version does not have" in fault
    assert arguments == []


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("actor_rollout.fsdp_config.sharding_strategy=SHARD_GRAD_OP", "sharding.strategy=SHARD_GRAD_OP"),
        ("actor_rollout.fsdp_config.cpu_offload=true", "sharding.cpu_offload=true"),
    ],
)
def test_what_takes_more_than_one_assignment_here_is_told(given, ours):
    arguments, assigned = command_line("ppo", [given])
    (fault,) = assigned.faults
    assert f"{ours} here" in fault
    assert arguments == []


def test_every_alias_leads_to_a_key_or_option_that_exists():
    options = group_options()
    chosen = [choice for alias in ALIASES.values() for choice in (*alias.choices.values(), alias.option) if choice]
    for choice in chosen:
        group, option = choice.format(files="files").split("=")
        assert option in options[group], choice

    config = compose_root("ppo", ["actor=pretrained", "critic=own_model", "data=files", "reward=model"])
    apply_values(config, [(alias.path, "value") for alias in ALIASES.values() if alias.path])
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert not [fault for fault in caught.value.faults if "not a known key" in fault]


def test_a_short_file_is_flattened_to_paths_and_whole_components_stay_whole():
    whole = {"_target_": "x.Y", "a": {"b": 1}}
    tree = {"trainer": {"seed": 1}, "algorithm": "grpo", "reward": whole}
    assert list(flatten(tree)) == [("trainer.seed", 1), ("algorithm", "grpo"), ("reward", whole)]


def test_null_for_a_group_chooses_its_option_none_where_it_has_one():
    assert assign("ppo", [("critic", None), ("experiment", None)]).options == ["critic=none"]
    assert assign("ppo", [("actor", None)]).faults == ["actor is null: a run needs one."]


def test_a_key_below_a_reference_leaves_the_other_keys_and_the_referred_component_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    arguments, _ = command_line("ppo", [f"critic.model.path={tmp_path}", "trainer.seed=3"])
    run = validate(compose_root("ppo", arguments))
    assert run.critic.model.path == str(tmp_path)
    assert run.actor.model.path != str(tmp_path)
    assert run.critic.model.attention == run.actor.model.attention


def test_an_option_whose_name_hydra_would_read_as_a_number_can_be_chosen():
    arguments, assigned = command_line("ppo", ["debug=nan", "trainer.seed=3"])
    assert assigned.faults == []
    for overrides in (arguments, ["debug=nan"]):
        assert compose_root("ppo", overrides).trainer.safety.plant_nan_at == 2
    assert command_line("ppo", ["-m", "debug=smoke,nan"])[0] == ["-m", "debug=smoke,'nan'"]
    assert command_line("ppo", ["trainer.seed=nan"])[0] == ["++trainer.seed=nan"]


@pytest.mark.parametrize(
    "words",
    [
        [
            "algorithm=grpo",
            "++actor.optimizer={lr:3}",
            "++actor.optimizer.lr=4",
            "++rollout.stop=['a,b',${x}]",
            "++a.b=1",
        ],
        ["trainer.seed=1", "++trainer.seed.deeper=2", "+actor.model.x=3", "++hydra.run.dir=x", "++critic.model.y=4"],
    ],
)
def test_values_set_in_a_cached_composition_are_what_hydra_makes_of_all_the_words(words):
    for _ in range(2):  # composed, and from the cache
        cached, _ = _composition("ppo", words)
        whole, _ = _compose("ppo", words)
        assert OmegaConf.to_container(cached, resolve=False) == OmegaConf.to_container(whole, resolve=False)
        assert OmegaConf.is_struct(cached) == OmegaConf.is_struct(whole)


@pytest.mark.parametrize("word", ["++trainer.seed=1,2", "++trainer.seed=[", "++rollout.temperature.x=[1"])
def test_a_value_that_cannot_be_set_is_refused_in_the_words_of_hydra(word):
    with pytest.raises(HydraException) as expected:
        _compose("ppo", [word])
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        compose_root("ppo", [word])
