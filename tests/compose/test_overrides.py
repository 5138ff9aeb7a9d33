"""What a user assigns, in our spelling and in other people's: Hydra reads it, and `validate` finds what is wrong."""

import re

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from refusals import refusal
from yaml import YAMLError

from verl.compose.compose import _compose, _composition, apply_values, compose_root
from verl.compose.defaults import fill_defaults
from verl.compose.from_yaml import compose_over_default
from verl.compose.overrides import (
    ALIASES,
    MEANT,
    Overrides,
    assign,
    command_line,
    composition_fault,
    flatten,
    meant,
    parse_overrides,
)
from verl.compose.schema import conf_dir, group_options
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.trainer.config import LoopSettings


def composed(*words: str):
    """The configuration of a command line without faults."""
    arguments, assigned = command_line("ppo", words)
    assert assigned.faults == []
    return compose_root("ppo", [word for word in arguments if not word.startswith("-")])


def checked(*words: str, root: str = "ppo"):
    """The run of a command line, after the check."""
    arguments, assigned = command_line(root, words)
    return validate(compose_root(root, arguments), assigned.faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("actor.model.path=/data/a b/c", "/data/a b/c"),
        ('actor.model.path="/data/a,b"', "/data/a,b"),
        ("actor.model.path='a b'", "a b"),
        ("actor.model.path=/данные/größe", "/данные/größe"),
        ("actor.model.path=it's here", "it's here"),
        ("actor.model.path=C:\\new\\x#1", "C:\\new\\x#1"),
        ("actor.model.path=a=b", "a=b"),
        ("actor.model.path=~/m, 1", "/home/me/m, 1"),
        ("actor.model.path=${rollout._target_}", "verl.rollout.hf.HFRollout"),
        ("trainer.experiment_name=2024", 2024),
        ('data.system_prompt="a, b"', "a, b"),
        ("rollout.stop_token_ids=[1,2]", [1, 2]),
        ("data.train_files=[a b.jsonl,'q,r.jsonl']", ["a b.jsonl", "q,r.jsonl"]),
        ("data.train_files=[]", []),
        ("data.train_files=[~/a b.jsonl, ~/c.jsonl]", ["/home/me/a b.jsonl", "/home/me/c.jsonl"]),
        ("resume=null", None),
        ("resume=latest", "latest"),
        ("+resume=runs/a b", "runs/a b"),
        ("++resume=/x/global_step_2", "/x/global_step_2"),
        ("trainer.unknown.key=1", 1),
    ],
)
def test_a_value_is_what_hydra_reads_and_else_a_text(word, value, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    key = word.partition("=")[0].lstrip("+")
    assert OmegaConf.select(composed(word), key) == value
    if "${" not in word:
        assert parse_overrides([word]) == ([(key, value)], [])  # and by LocalPPOTrainer(overrides=[...])
        assert OmegaConf.select(compose_over_default({}, [word]).config, key) == value


def test_several_values_without_a_sweep_are_refused_and_each_way_out_is_shown():
    with refusal("data.system_prompt", value="a, b"):
        checked("data.system_prompt=a, b")
    with refusal("data.files", "algorithm"):
        checked("data.files=x,y", "algorithm=grpo,ppo")
    assert len(parse_overrides(["data.system_prompt=a, b"])[1]) == 1


def test_everything_wrong_is_reported_at_once_by_its_path():
    wrong = ("algorithm=gr-po", "grpo", "traner.seed=1", "trainer.total-steps=3", "trainer.seed=[1", "rollout.top_p=2")
    with refusal("'grpo'", "algorithm=gr-po", "traner.seed", "rollout.top_p", "trainer.total-steps", "trainer.seed"):
        checked(*wrong)


@pytest.mark.parametrize(
    ("word", "path", "meant"),
    [
        ("algorithm=gropo", "algorithm=gropo", "grpo?"),
        ("algorithm=GRPO", "algorithm=GRPO", "grpo?"),
        ("grpo", "'grpo'", "algorithm=grpo?"),
        ("Trainer.seed=1", "Trainer.seed", "trainer?"),
        ("trainr=local", "trainr", "trainer?"),
        ("actor.optimizer.LR=1", "actor.optimizer.LR", "actor.optimizer.lr?"),
        ("trainer.total-steps=3", "trainer.total-steps", "trainer.total_steps?"),
        ("trainer.lr=1", "trainer.lr", "actor.optimizer.lr?"),
        ("algorithm=[grpo,ppo]", "algorithm=[grpo,ppo]", "grpo"),
        ("actor=null", "actor", None),
        ("=3", "'=3'", "KEY=VALUE"),
        ("trainer..seed=3", "'trainer..seed=3'", "KEY=VALUE"),
    ],
)
def test_what_is_no_assignment_or_no_choice_is_one_fault_with_the_nearest_name(word, path, meant):
    with refusal(path, value=meant):
        checked(word)


@pytest.mark.parametrize(
    "argument", ["-m", "--cfg job", "hydra.verbose=true", "~critic", "hydra/launcher=basic", "data@held=files"]
)
def test_what_is_meant_for_hydra_passes_as_it_is(argument):
    assert command_line("ppo", argument.split()) == (argument.split(), Overrides(is_sweep=argument == "-m"))


def test_flags_may_stand_between_assignments_and_an_unknown_one_ends_the_process():
    arguments, _ = command_line("ppo", ["trainer.seed=1", "--cfg", "job", "algorithm=grpo"])
    assert arguments == ["--cfg", "job", "algorithm=grpo", "++trainer.seed=1"]
    with pytest.raises(SystemExit):
        command_line("ppo", ["--trainer.seed=3"])


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    ("words", "key", "values"),
    [
        (["trainer.seed=0,1"], "trainer.seed", [0, 1]),
        (["trainer.seed=range(1,3)"], "trainer.seed", [1, 2]),
        (["actor.model.path='a,b',c"], "actor.model.path", ["a,b", "c"]),
        (
            ["trainer.n_gpus_per_node='${processes:${sharding._target_},2}',4", "sharding=ddp"],
            "trainer.n_gpus_per_node",
            [2, 4],
        ),
        (["algorithm=ppo,grpo"], "trainer.group_size", [1, 4]),
        (["algorithm=glob(gr*)"], "trainer.group_size", [4]),
        (["debug=smoke,nan"], "trainer.total_steps", [2, 4]),
        (["trainer.backend=local,ddp"], "trainer.seed", None),
    ],
)
def test_several_values_are_the_jobs_of_a_sweep(words, key, values):
    arguments, assigned = command_line("ppo", ["-m", *words])
    if values is None:
        assert len(assigned.faults) == 1
        return
    assert assigned.faults == []
    loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create(loader).parse_overrides(arguments[1:]), None)
    assert [OmegaConf.select(compose_root("ppo", job), key) for job in jobs] == values


def test_what_is_given_twice_counts_the_second_time():
    config = composed("trainer.seed=1", "algorithm=ppo", "trainer.seed=2", "algorithm=grpo")
    assert (config.trainer.seed, config.trainer.group_size) == (2, 4)


@pytest.mark.slow
def test_options_are_also_looked_for_in_the_directories_of_the_user(tmp_path):
    conf = tmp_path / "my conf"
    (conf / "reward").mkdir(parents=True)
    (conf / "reward/mine.yaml").write_text("_target_: verl.rewards.rules.Length\nmin_tokens: 2\n")
    for argument in (f"--config-dir={conf}", f"--config-path={conf}", f"hydra.searchpath=[file://{conf}]"):
        arguments, assigned = command_line("ppo", [argument, "reward=mine", "critic.model.dtype=float64"])
        assert assigned.faults == []
        run = validate(compose_root("ppo", [word for word in arguments if not word.startswith("-")]))
        assert run.reward.min_tokens == 2
        assert "mine?" in command_line("ppo", [argument, "reward=mien"])[1].faults[0]
    assert command_line("ppo", ["reward=mine"])[1].faults
    with refusal("--config-dir", value="nowhere"):
        command_line("ppo", ["--config-dir=nowhere", "reward=mine"])


def test_a_file_of_options_that_is_not_yaml_is_named_with_the_line(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/broken.yaml").write_text("# @package _global_\ntrainer: [\n")
    arguments, _ = command_line("ppo", [f"--config-dir={tmp_path}", "experiment=broken"])
    with pytest.raises(YAMLError) as failed:
        compose_root("ppo", arguments[1:])
    said = composition_fault("ppo", failed.value)
    assert "broken.yaml" in said
    assert "line 3" in said
    (tmp_path / "experiment/broken.yaml").write_text("trainer: {}\n")
    with pytest.raises(ConfigCompositionException) as failed:
        compose_root("ppo", arguments[1:])
    assert composition_fault("ppo", failed.value).startswith("experiment/broken.yaml lacks the line `# @package")


@pytest.mark.parametrize(
    ("words", "path", "kind"),
    [
        (["reward={_target_:verl.rewards.rules.Length,max_tokens:3}"], "reward", "Length"),
        (["rollout={_target_:verl.rollout.scripted.ScriptedRollout,texts:[a]}"], "rollout", "ScriptedRollout"),
        (["reward={_target_:verl.rewards.rules.Length}", "reward.max_tokens=3"], "reward", "Length"),
    ],
)
def test_a_component_that_is_written_out_takes_the_place_of_the_default_option(words, path, kind):
    node = composed(*words)[path]
    assert node["_target_"].endswith(f".{kind}")
    assert "answer_key" not in node


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["nogroup=x"], "nogroup"),
        (["algorithm=nope"], "algorithm/nope"),
        (["~nothere"], "nothere"),
        (["~trainer.nope"], "trainer.nope"),
        (["trainer@x=local"], "trainer@x"),
        (["trainer.seed=${nowhere}"], "nowhere"),
        (["trainer.seed=${oc.env:VERL_NOT_SET}"], "VERL_NOT_SET"),
        (["trainer.seed=${nores:1}"], "nores"),
        (["trainer.seed=${trainer.total_steps"], "{"),
        (["++trainer.seed=[1"], "[1"),
        (["hydra/launcher=nope"], "hydra/launcher/nope"),
        (["++hydra.run.dir=null"], "hydra.run.dir"),
        (["debug=smoke", "+debug=nan"], "debug"),
    ],
)
def test_what_hydra_says_of_a_failed_composition_is_told_on_one_line(overrides, named):
    with pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as failed:
        compose_root("ppo", overrides).trainer.seed  # noqa: B018 - a reference is resolved when it is read
    said = composition_fault("ppo", failed.value)
    assert named in said
    assert "\n" not in said
    assert "verl ppo --help" in said


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../b", "~/x", "", "a" * 300, "a\nb"])
def test_a_name_that_is_no_directory_below_that_of_runs_is_refused(name):
    for key in ("project_name", "experiment_name"):
        with refusal(key):
            LoopSettings(**{key: name})
        assert getattr(LoopSettings(**{key: "lr/1e-3, größer"}), key) == "lr/1e-3, größer"


# Spellings of other libraries


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
        ("actor_rollout.fsdp_config.sharding_strategy=NO_SHARD", ["sharding=none"]),
        ("actor_rollout.fsdp_config.sharding_strategy=FULL_SHARD", ["sharding=fsdp"]),
        (
            "actor_rollout.fsdp_config.sharding_strategy=SHARD_GRAD_OP",
            ["sharding=fsdp", "++sharding.strategy=SHARD_GRAD_OP"],
        ),
        ("actor_rollout.fsdp_config.cpu_offload=false", []),
        ("actor_rollout.fsdp_config.cpu_offload=true", ["sharding=fsdp", "++sharding.cpu_offload=true"]),
        ("actor_rollout.use_vllm=False", []),
        ("actor_rollout.use_vllm=true", ["rollout=vllm"]),
        ("trainer.save_freq=-1", ["++checkpoint.save_interval=null"]),
        ("trainer.save_freq=7", ["++checkpoint.save_interval=7"]),
        ("use_critic=false", ["critic=none"]),
        ("use_reference_policy=false", ["reference=none"]),
        ("use_rm=false", []),
        ("use_rm=true", ["reward=model"]),
        ("data.train_files=[a.jsonl]", ["data=files", "++data.train_files=[a.jsonl]"]),
    ],
)
def test_an_alias_becomes_our_spelling_and_is_reported(given, became):
    arguments, assigned = command_line("ppo", [given])
    assert arguments == became
    assert assigned.faults == []
    assert assigned.notes[0].startswith(given.split("=")[0])


def test_an_alias_with_a_python_value_keeps_it():
    pairs = [
        ("trainer.save_freq", -1),
        ("rollout.n", 8),
        ("actor_rollout.use_vllm", True),
        ("data.train_files", ["a,b"]),
    ]
    assigned = assign("ppo", pairs)
    assert assigned.options == ["rollout=vllm", "data=files"]
    assert assigned.values == [
        ("checkpoint.save_interval", None), ("trainer.group_size", 8), ("data.train_files", ["a,b"]),
    ]  # fmt: skip


def test_an_alias_does_not_choose_again_what_is_chosen_by_name():
    arguments, assigned = command_line("ppo", ["actor=llama1b", "actor_rollout.model_name_or_path=D"])
    assert arguments == ["actor=llama1b", "++actor.model.path=D"]
    assert assigned.faults == []


def test_aliases_of_one_group_go_together_in_any_order():
    words = [f"actor_rollout.fsdp_config.{word}" for word in ("sharding_strategy=HYBRID_SHARD", "cpu_offload=true")]
    for given in (words, words[::-1]):
        node = composed(*given).sharding
        assert (node["_target_"].rpartition(".")[2], node.cpu_offload) == ("HSDP", True)


def test_files_of_sft_are_no_prompts():
    assert command_line("sft", ["data.train_files=[a.jsonl]"])[0][0] == "data=sft_files"


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("ppo", "trainer.backend=local sharding=ddp"),
        ("ppo", "trainer.backend=local actor_rollout.use_vllm=true trainer.backend=ddp"),
        ("ppo", "trainer.backend=megatron"),
        ("ppo", "algorithm.adv_estimator=vine"),
        ("ppo", "ray.nothing=1"),
        ("sft", "actor_rollout.use_vllm=true"),
        ("sft", "algorithm=grpo"),
    ],
)
def test_what_contradicts_another_or_is_not_there_is_one_fault(root, words):
    arguments, assigned = command_line(root, words.split())
    assert len(assigned.faults) == 1
    assert not [word for word in arguments if word.startswith(("storage", "algorithm", "++ray"))]


def test_every_alias_leads_to_a_key_or_option_that_exists():
    options, paths = group_options(), []
    texts = [text for alias in ALIASES.values() for text in (alias.values() if isinstance(alias, dict) else [alias])]
    for word in " ".join(texts).format(files="files").split():
        key, sign, option = word.partition("=")
        paths += [key] if "." in key else []
        assert not sign or "." in key or option in options[key], word
    config = compose_root("ppo", ["actor=pretrained", "critic=own_model", "data=files", "reward=model"])
    apply_values(config, [(path, "value") for path in paths])
    with pytest.raises(ConfigError) as caught:
        validate(config)
    unknown = [fault.split()[0] for fault in caught.value.faults if "not a known key" in fault]
    assert set(unknown) <= {"sharding.strategy", "sharding.cpu_offload"}  # of sharding=fsdp


def test_a_name_of_another_library_leads_to_the_key_that_has_its_meaning():
    chosen = ["actor=pretrained", "+actor.lora.rank=8", "algorithm=grpo", "rollout=vllm", "reward=function"]
    config = compose_root("ppo", [*chosen, "data=files"])
    for word in (word for words in MEANT.values() for word in words.split()):
        above, _, key = str(meant(f"actor_rollout_ref.{word}", config)).rpartition(".")
        assert key in [*(OmegaConf.select(config, above) if above else config)], word
    assert meant("beta", ["loss"]) == "loss.beta"


# Values by path


def test_a_short_file_is_flattened_to_paths_and_whole_components_stay_whole():
    whole = {"_target_": "x.Y", "a": {"b": 1}}
    tree = {"trainer": {"seed": 1}, "algorithm": "grpo", "reward": whole}
    assert list(flatten(tree)) == [("trainer.seed", 1), ("algorithm", "grpo"), ("reward", whole)]


def test_null_for_a_group_chooses_its_option_none_where_it_has_one():
    assert assign("ppo", [("critic", None), ("experiment", None)]).options == ["critic=none"]
    assert len(assign("ppo", [("actor", None)]).faults) == 1


def test_a_key_below_a_reference_leaves_the_other_keys_and_the_referred_component_as_they_are(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    run = validate(composed(f"critic.model.path={tmp_path}", "trainer.seed=3"))
    assert run.critic.model.path == str(tmp_path)
    assert run.actor.model.path != str(tmp_path)
    assert run.critic.model.attention == run.actor.model.attention


@pytest.mark.slow
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
        fill_defaults(whole)
        assert OmegaConf.to_container(cached, resolve=False) == OmegaConf.to_container(whole, resolve=False)
        assert OmegaConf.is_struct(cached) == OmegaConf.is_struct(whole)


@pytest.mark.parametrize("word", ["++trainer.seed=1,2", "++trainer.seed=[", "++rollout.temperature.x=[1"])
def test_a_value_that_cannot_be_set_is_refused_in_the_words_of_hydra(word):
    with pytest.raises(HydraException) as expected:
        _compose("ppo", [word])
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        compose_root("ppo", [word])
