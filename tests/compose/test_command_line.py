"""Arguments of the main scripts: paths are taken as they stand, and what cannot be read is told in our words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import exhaustive
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.compose.command_line import command_line, composition_faults, in_grammar, is_path, parse_overrides
from verl.compose.compose import compose_root
from verl.compose.from_yaml import compose_over_default
from verl.compose.overrides import split_at_commas
from verl.compose.schema import conf_dir
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.trainer.config import LoopSettings

RAW = re.compile(r"hydra\.cc|Lexer|token recognition|viable|mismatched|PPORoot|object_type|full_key|usage:|HYDRA_|See ")
ODD = (
    "/data/a b/c", "/data/a,b", "it's here", 'say "hi"', "/a[1]/b{2}(3)", "/run#1", "/данные/größe/数", "s3://b/p?x=1&y=2",
    "a=b", "C:\\new\\x", "ends\\", "/a;b|c!^&*%$", "1e5", "2024", "null.d", "@x", "-x", "'", "~other/x", "a'b\"c,[d",
)  # fmt: skip
KEYS_OF_PATHS = ("actor.model.path", "checkpoint.save_dir", "resume", "reward.path")


# Four paths at a time, one for each key; in all of them each path is the value of each key
PATHS = [
    [ODD[start + (number + shift) % 4] for number in range(4)] for shift in range(4) for start in range(0, len(ODD), 4)
]


@pytest.mark.parametrize("paths", [*PATHS[: len(ODD) // 4], *exhaustive(*PATHS[len(ODD) // 4 :])])
def test_a_value_that_is_a_path_is_taken_as_it_stands(paths):
    values = dict(zip(KEYS_OF_PATHS, paths, strict=True))
    words = [f"{key}={path}" for key, path in values.items()]
    arguments, assigned = command_line("ppo", [*words, "reward=function"])
    assert assigned.faults == []
    config = compose_root("ppo", [a for a in arguments if not a.startswith("-")])
    assert {key: OmegaConf.select(config, key) for key in KEYS_OF_PATHS} == values
    assert parse_overrides(words) == ([*values.items()], [])  # and by LocalPPOTrainer(overrides=[...])
    assert compose_over_default({}, [*words, "reward=function"]).faults == []


def test_a_tilde_is_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    arguments, _ = command_line("ppo", ["actor.model.path=~/m, 1", "data.train_files=[~/a.jsonl]", "hydra.run.dir=~/r"])
    assert arguments == [
        "hydra.run.dir=/home/me/r", "data=files", "++actor.model.path='/home/me/m, 1'",
        "++data.train_files=[/home/me/a.jsonl]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("[a.parquet,b.parquet]", ["a.parquet", "b.parquet"]),
        ("[a b.parquet, ~x/é.parquet]", ["a b.parquet", "~x/é.parquet"]),
        ("[it's.parquet,b#1.parquet]", ["it's.parquet", "b#1.parquet"]),
        ("['q,r.parquet',s.parquet]", ["q,r.parquet", "s.parquet"]),
        ("[a[1,2].parquet,b.parquet]", ["a[1,2].parquet", "b.parquet"]),
        ("[one,two.jsonl,b.jsonl]", ["one,two.jsonl", "b.jsonl"]),  # where a file of that name is there
        ("[2024]", ["2024"]),
        ("[]", []),
    ],
)
def test_a_list_of_paths_is_divided_at_commas_between_them(text, paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one,two.jsonl").touch()
    value = OverridesParser.create().parse_override(f"k={in_grammar('data.train_files', text)}").value()
    assert [str(path) for path in value] == paths


def test_a_path_that_is_there_is_one_path_and_another_with_commas_is_a_sweep_under_m(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a,b").mkdir()
    assert command_line("ppo", ["-m", "actor.model.path=a,b"])[0][-1] == "++actor.model.path='a,b'"
    assert command_line("ppo", ["-m", "actor.model.path=c,d"])[0][-1] == "++actor.model.path=c,d"
    assert command_line("ppo", ["-m", "actor.model.path=é,d"])[0][-1] == "++actor.model.path='é',d"
    assert command_line("ppo", ["actor.model.path=c,d"])[0][-1] == "++actor.model.path='c,d'"


def test_values_that_hydra_reads_are_left_as_they_are():
    for pair in ("trainer.seed=3", "actor.model.path=out/actor", "actor.lora={_target_:verl.models.lora.LoRA,rank:8}",
                 "actor.model.path=${reference.x}", "resume=null", "data.train_files=[a.jsonl,b.jsonl]",
                 "actor.model.path='a b'"):  # fmt: skip
        assert command_line("ppo", [pair])[0][-1] == f"++{pair}"


def test_every_field_that_holds_a_path_is_known_as_one():
    for key in ("actor.model.path", "data.train_files", "data.eval_files", "checkpoint.save_dir", "storage.root",
                "resume", "actor.model.tokenizer_path", "trainer.default_local_dir", "hydra.run.dir"):  # fmt: skip
        assert is_path(key), key
    assert not is_path("trainer.experiment_name")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--trainer.seed=3", "without dashes. Write trainer.seed=3"),
        ("--multirn", "Did you mean --multirun?"),
        ("--help=3", "--help=3"),
        ("--cfg", "--cfg job"),
        ("--cfg jop", "expected job, hydra, all. Did you mean job?"),
        ("--cfg job --package zzz", "--package is zzz"),
        ("-m --cfg job", "Leave -m out"),
        ("trainer.seed", "write trainer.seed=VALUE"),
        ("grpo", "Did you mean algorithm=grpo?"),
        ("=3", "is not a key"),
        ("trainer..seed=3", "Did you mean trainer.seed?"),
        ("trainer.total-steps=3", "Did you mean trainer.total_steps?"),
        ("trainer.seed=1,2", "add -m for a sweep"),
        ("algorithm=grpo,ppo", "add -m for a sweep"),
        ("algorithm=gr-po", "Did you mean grpo?"),
        ("~traner", "Did you mean trainer?"),
        ("traner@x=local", "Did you mean trainer?"),
        ("~trainer", "~trainer: a run needs one. Write trainer=OPTION; there are dpo, dpo_ray, local, "),
        ("~algorithm=ppo", "a run needs one"),
        ("trainer.seed=${trainer.total_steps", "the reference cannot be parsed. Write ${other.key} with"),
        ("trainer.experiment_name=a${x", "trainer.experiment_name is 'a${x': the reference cannot be parsed"),
        ("reward={_target_:}", "reward={_target_:}: its _target_ is empty"),
        ('algorithm="ppo', "no such option; there are cispo, "),
        ("-m trainer.seed=range(3,1)", "has no value, so the sweep has no jobs"),
        ("-m trainer.seed=glob(*)", "has no value, so the sweep has no jobs"),
        ("-m algorithm=glob(zz*)", "there is no such option, so the sweep has no jobs; there are cispo, "),
    ],
)
def test_an_argument_that_cannot_be_read_is_told_in_our_words(argument, said):
    _, assigned = command_line("ppo", argument.split())
    (fault,) = assigned.faults
    assert said in fault
    assert not RAW.search(fault)


def test_what_may_be_left_out_or_refers_to_another_key_or_chooses_options_is_let_through():
    words = ["-m", "~replay", "~storage", "~trainer.total_steps", "algorithm=glob(g*)", "trainer.seed=range(1,3)"]
    words += ["trainer.experiment_name=a_${trainer.seed}", "trainer.total_steps=${oc.decode:${oc.env:STEPS,3}}"]
    assert command_line("ppo", words)[1].faults == []


def test_what_is_given_twice_is_told_and_the_last_counts():
    arguments, assigned = command_line("ppo", ["trainer.seed=1", "trainer.seed=2", "algorithm=grpo", "algorithm=ppo"])
    assert assigned.notes[-2:] == [
        "trainer.seed is given 2 times: 2 counts, not 1.",
        "algorithm is given 2 times: ppo counts, not grpo.",
    ]
    assert compose_root("ppo", arguments).trainer.seed == 2
    assert command_line("ppo", ["trainer.seed=2", "trainer.seed=2"])[1].notes == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("../x", "leads out of"), ("/x", "leads out of"), ("a/../../b", "leads out of"), ("~/x", "leads out of"),
     ("", "is empty"), ("a" * 300, "is longer than 200 bytes"), ("a\nb", "cannot be printed")],
)  # fmt: skip
def test_a_name_that_is_no_directory_below_that_of_runs_is_refused(name, said):
    for key in ("project_name", "experiment_name"):
        with pytest.raises(ConfigError, match=said):
            LoopSettings(**{key: name})
        assert getattr(LoopSettings(**{key: "lr/1e-3, größer"}), key) == "lr/1e-3, größer"


@pytest.mark.parametrize(
    ("values", "pieces"),
    [
        ("${processes:${sharding._target_},2},4", ["${processes:${sharding._target_},2}", "4"]),
        ("3,${divide:${divide:9,3},${divide:2,2}}", ["3", "${divide:${divide:9,3},${divide:2,2}}"]),
        ("[[1,2],[3]],[4]", ["[[1,2],[3]]", "[4]"]),
        ("{a:{b:1,c:2},d:[1,2]},null", ["{a:{b:1,c:2},d:[1,2]}", "null"]),
        ("a(b,c", ["a(b", "c"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("it's,b", ["it's", "b"]),
    ],
)
def test_values_of_a_sweep_are_divided_at_commas_outside_of_brackets_however_deep(values, pieces):
    assert split_at_commas(values) == pieces


def test_a_reference_with_arguments_is_one_value_of_a_sweep():
    words = ["-m", "trainer.n_gpus_per_node=${processes:${sharding._target_},2},4", "sharding=ddp"]
    arguments, assigned = command_line("ppo", words)
    assert assigned.faults == []
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(arguments[1:]), None)
    assert [compose_root("ppo", job).trainer.n_gpus_per_node for job in jobs] == [2, 4]


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["algorithm=GRPO"], "grpo"), (["Trainer.seed=1"], "trainer"), (["actor.optimizer.LR=1"], "actor.optimizer.lr")],
)
def test_a_name_in_other_letters_case_gets_the_suggestion(words, meant):
    arguments, assigned = command_line("ppo", words)
    with pytest.raises(ConfigError, match=f"Did you mean {meant}[?]"):
        validate(compose_root("ppo", arguments), assigned.faults)


def test_whatever_is_wrong_with_arguments_is_told_at_once_without_a_word_of_hydra(fork_server, tmp_path):
    wrong = ["--trainer.seed=3", "grpo", "trainer.seed=1,2"]
    for arguments in ([*wrong, "trainer.total_steps=3#"], [*wrong, "~trainer.sed"], ["hydra.foo=1"]):
        done = fork_server.run([conf_dir().parent / "main_ppo.py", *arguments], tmp_path)
        assert done.returncode == 2
        assert not RAW.search(done.stderr), done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) >= len(arguments), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_without_its_package_line_or_with_broken_yaml_is_named(tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    (conf / "experiment").mkdir(parents=True)
    (conf / "experiment/mine.yaml").write_text("trainer:\n  seed: 3\n")
    (conf / "experiment/broken.yaml").write_text("# @package _global_\ntrainer: [\n")
    (conf / "experiment/good.yaml").write_text("# purpose\n# @package _global_\ntrainer: {seed: 3}\n")
    monkeypatch.setattr("verl.compose.schema.conf_dir", lambda: conf)
    (fault,) = command_line("ppo", ["experiment=mine"])[1].faults
    assert "mine.yaml does not begin with the line `# @package _global_`" in fault
    (fault,) = command_line("ppo", ["experiment=broken"])[1].faults
    assert "broken.yaml line 3 is not readable as YAML" in fault
    assert command_line("ppo", ["experiment=good"])[1].faults == []


@pytest.mark.parametrize("override", ["algorithm=nope", "~trainer.nope", "trainer@x=local"])
def test_what_hydra_finds_while_it_composes_is_put_into_our_words(override):
    with pytest.raises(HydraException) as caught:
        compose_root("ppo", [override])
    (fault,) = composition_faults("ppo", caught.value)
    assert not RAW.search(fault)
    assert fault.endswith((".", "?"))


def test_groups_of_ones_own_are_judged_and_composed_like_those_of_the_package(tmp_path):
    conf = tmp_path / "my 'conf"
    for name, text in {
        "reward/mine": "_target_: verl.rewards.rules.Length\nmin_tokens: 2\n",
        "trainer/bad": "seed: [\n",
    }.items():
        (conf / name).parent.mkdir(parents=True)
        (conf / f"{name}.yaml").write_text(text)
    words = ["--config-dir", str(conf), "reward=mine", "critic.model.dtype=float64"]
    arguments, assigned = command_line("ppo", words)
    assert assigned.faults == []
    assert ("critic.model.path", "${actor.model.path}") in assigned.values  # what the other keys of the node were
    run = validate(compose_root("ppo", [word for word in arguments if "=" in word]), assigned.faults)
    assert run.reward.min_tokens == 2
    (fault,) = command_line("ppo", ["--config-dir", str(conf), "reward=mien"])[1].faults
    assert "Did you mean mine?" in fault
    (fault,) = command_line("ppo", [f"--config-dir={conf}", "trainer=bad"])[1].faults
    assert "bad.yaml line 2 is not readable as YAML" in fault
    (fault,) = command_line("ppo", ["reward=mine"])[1].faults
    assert "no such option" in fault


def test_an_option_that_names_itself_in_its_defaults_is_told_in_one_sentence(tmp_path, fork_server):
    (tmp_path / "conf/algorithm").mkdir(parents=True)
    (tmp_path / "conf/algorithm/ring.yaml").write_text("defaults:\n  - ring\n")
    done = fork_server.run([conf_dir().parent / "main_ppo.py", "--config-dir", "conf", "algorithm=ring"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("a file of options names itself in its list of defaults")


@pytest.mark.parametrize(
    ("words", "path", "kind"),
    [
        (["reward={_target_:verl.rewards.rules.Length,max_tokens:3}"], "reward", "Length"),
        (["rollout={_target_:verl.rollout.scripted.ScriptedRollout,texts:[a]}"], "rollout", "ScriptedRollout"),
        (["reward={_target_:verl.rewards.rules.Length}", "reward.max_tokens=3"], "reward", "Length"),
    ],
)
def test_a_component_that_is_written_out_takes_the_place_of_the_default_option(words, path, kind):
    arguments, assigned = command_line("ppo", words)
    node = compose_root("ppo", arguments)[path]
    assert node["_target_"].endswith(f".{kind}")
    assert "answer_key" not in node
    if path == "reward":
        assert validate(compose_root("ppo", arguments), assigned.faults).reward.min_tokens == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["nogroup=x"], "nogroup is not a known key: ppo.yaml has no nogroup."),
        (["algorithm=nope"], "algorithm=nope: no such option; there are cispo, "),
        (["~nothere"], "~nothere: there is no nothere to remove."),
        (["trainer.seed=${nowhere}"], "trainer.seed refers to ${nowhere}, which does not exist."),
        (
            ["trainer.seed=${oc.env:VERL_NOT_SET}"],
            "${oc.env:VERL_NOT_SET}: the environment variable VERL_NOT_SET is not",
        ),
        (["trainer.seed=${nores:1}"], "${nores:...}: there is no resolver nores."),
        (["+trainer.seed=2"], "trainer.seed exists already: write trainer.seed=VALUE"),
        (["++trainer.seed=[1"], "[1 has an unclosed bracket or quote, or is not a value"),
        (["sharding@nowhere.sharding=ddp"], "sharding@nowhere.sharding: nothing is chosen there yet. Write +sharding@"),
        (["hydra/launcher=nope"], "hydra/launcher=nope: Hydra has no such option"),
        (["trainer.seed=${now:}"], "the reference in trainer.seed cannot be resolved ("),
        (["++hydra.run.dir=null"], "hydra.run.dir=null: it cannot be set (field 'hydra.run.dir' is not Optional)."),
    ],
)
def test_each_way_in_which_hydra_fails_to_compose_has_words_of_ours(overrides, said):
    with pytest.raises((HydraException, OmegaConfBaseException)) as failed:
        compose_root("ppo", overrides).trainer.seed  # noqa: B018 - a reference is resolved when it is read
    (told,) = composition_faults("ppo", failed.value)
    assert told.startswith(said)
    assert "cannot be composed" not in told


@pytest.mark.parametrize("words", [["--resume_from_checkpoint", "runs/a b"], ["--resume-from-checkpoint=runs/a b"]])
def test_the_flag_of_other_scripts_that_resumes_is_answered_by_the_setting(words):
    _, assigned = command_line("ppo", words)
    (fault,) = assigned.faults
    assert "resume='runs/a b'" in fault or "resume=runs/a b" in fault
