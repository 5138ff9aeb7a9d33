"""The check of a configuration: every fault at once, each by its path."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Iterator

import pyarrow
import pyarrow.parquet
import pytest
from cases import exhaustive
from omegaconf import OmegaConf

import verl
from verl.component import INVALID, Description, component, field_types, set_fields
from verl.compose.compose import apply_values, compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.errors import ConfigError


@component
class Wheel(Description):
    radius_m: float
    spokes: tuple[int, ...] = ()

    def faults(self) -> Iterator[str]:
        if self.radius_m <= 0:
            yield f"radius_m is {self.radius_m}: must be above 0."


@component
class Cart(Description):
    front: Wheel
    back: Wheel | None = None
    load_kg: float = 0.0
    riders: int = 1

    def faults(self) -> Iterator[str]:
        if self.load_kg < 0:
            yield f"load_kg is {self.load_kg}: must not be negative."
        if self.back is not None and self.back.radius_m != self.front.radius_m:
            yield "back.radius_m differs from front.radius_m."
        if self.riders < 1:
            yield f"riders is {self.riders}: must be at least 1."


HERE = __name__


def cart(**fields):
    wheel = {"_target_": f"{HERE}.Wheel", "radius_m": 1.0}
    return {"_target_": f"{HERE}.Cart", "front": wheel, **fields}


def faults_of(config, *known) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(OmegaConf.create(config), list(known))
    return caught.value.faults


def ppo_faults(*arguments: str) -> list[str]:
    hydra_arguments, assigned = command_line("ppo", arguments)
    with pytest.raises(ConfigError) as caught:
        validate(compose_root("ppo", hydra_arguments), assigned.faults)
    return caught.value.faults


def test_a_sound_configuration_becomes_its_description():
    config = cart(back="${front}", load_kg=3)
    config["front"]["spokes"] = [1, 2]
    wheel = Wheel(radius_m=1.0, spokes=(1, 2))
    assert validate(OmegaConf.create(config)) == Cart(front=wheel, back=wheel, load_kg=3)


def test_an_unknown_key_is_named_with_the_nearest_known_one():
    assert faults_of(cart(lod_kg=1)) == [
        "lod_kg is not a known key: Cart has no such field. Did you mean load_kg?",
    ]


def test_the_nearest_key_may_lie_in_another_component():
    assert faults_of(cart(radius=1)) == [
        "radius is not a known key: Cart has no such field. Did you mean front.radius_m?",
    ]


def test_a_key_like_no_other_gets_no_suggestion():
    assert faults_of(cart(zzz=1)) == ["zzz is not a known key: Cart has no such field."]


def test_wrong_types_are_found_in_every_component_at_once():
    config = cart(riders="many", back={"_target_": f"{HERE}.Wheel", "radius_m": "wide"})
    assert set(faults_of(config)) == {
        "riders is 'many': expected a whole number.",
        "back.radius_m is 'wide': expected a number.",
    }


def test_faults_of_values_do_not_hide_behind_faults_of_types():
    found = faults_of(cart(load_kg=-1, riders="many", back={"_target_": f"{HERE}.Wheel", "radius_m": 0}))
    assert set(found) == {
        "load_kg is -1.0: must not be negative.",
        "riders is 'many': expected a whole number.",
        "back.radius_m is 0.0: must be above 0.",
    }


def test_a_component_is_not_blamed_for_comparing_with_a_faulty_one():
    """`back` cannot be compared with `front`; only what was written before that is told of the cart."""
    config = cart(back={"_target_": f"{HERE}.Wheel", "radius_m": 2.0}, load_kg=-1)
    config["front"] = {"_target_": f"{HERE}.Wheel"}
    assert set(faults_of(config)) == {
        "front.radius_m is missing: Wheel needs it.",
        "load_kg is -1.0: must not be negative.",
    }


def test_a_reference_is_blamed_once_where_it_is_written():
    config = cart(back="${front}")
    config["front"]["radius_m"] = -1.0
    assert faults_of(config) == ["front.radius_m is -1.0: must be above 0."]


def test_references_that_lead_nowhere_or_in_circles_are_named():
    found = faults_of(cart(load_kg="${nowhere.at.all}", riders="${riders}", back="${back}"))
    assert len(found) == 3
    assert [fault.split(" is ")[0] for fault in found] == ["load_kg", "riders", "back"]


def test_two_nodes_that_contain_each_other_are_a_fault_and_no_endless_walk():
    config = cart(back={"_target_": f"{HERE}.Wheel", "radius_m": 1.0, "spokes": "${front}"})
    config["front"]["spokes"] = "${back}"
    assert any("contains itself" in fault for fault in faults_of(config))


def test_a_value_left_open_is_named():
    assert faults_of(cart(load_kg="???")) == ["load_kg is not set: it has no default, so give load_kg=..."]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nomodule.Wheel", "there is no module nomodule"),
        (f"{HERE}.Whel", f"{HERE} has no Whel"),
        ("fractions.Fraction", "it is not a component"),
        ("Wheel", "expected the dotted path"),
        (5, "expected the dotted path"),
    ],
)
def test_a_wrong_target_is_named_and_its_neighbours_are_still_checked(target, reason):
    found = faults_of(cart(back={"_target_": target, "radius_m": 1}, riders="many"))
    assert any(fault.startswith(f"back._target_ is {target!r}: {reason}") for fault in found)
    assert "riders is 'many': expected a whole number." in found


def test_a_component_without_target_says_so():
    (fault,) = faults_of(cart(back={"radius_m": 1}))
    assert fault.startswith("back is {'radius_m': 1}: expected a component with _target_ of kind Wheel")
    assert "It has no _target_" in fault


def test_faults_of_the_command_line_are_told_with_the_others():
    assert faults_of(cart(riders=0), "foo is not a key.") == ["foo is not a key.", "riders is 0: must be at least 1."]


def test_several_faults_of_a_ppo_run_are_all_told_by_full_path():
    found = ppo_faults(
        "algorithm.advantage.lam=1.5",
        "algorithm.advantage.gama=1",
        "trainer.total_steps=abc",
        "rollout.temprature=1",
        "actor.optimizer.lr=fast",
        "actor=lama8b",
    )
    assert [fault.split(" is ")[0].split(":")[0] for fault in found] == [
        "actor=lama8b",
        "actor.optimizer.lr",
        "rollout.temprature",
        "algorithm.advantage.gama",
        "algorithm.advantage.lam",
        "trainer.total_steps",
    ]
    assert "Did you mean llama8b?" in found[0]
    assert "Did you mean rollout.temperature?" in found[2]


def test_faults_across_components_have_full_paths():
    assert ppo_faults("algorithm=grpo", "trainer.group_size=1")[0].startswith("trainer.group_size is 1: GRPO")
    assert ppo_faults("critic=none")[0].startswith("critic is null: GAE needs values")
    assert ppo_faults("critic=null")[0].startswith("critic is null: GAE needs values")


def test_a_missing_file_is_told_before_anything_is_loaded(tmp_path):
    (fault,) = ppo_faults(f"data.train_files=[{tmp_path}/none.jsonl]", "rollout.max_new_tokens=4")
    assert fault.startswith("data.train_files[0] is")
    assert "no such file" in fault


def test_a_directory_that_is_no_model_is_told(tmp_path):
    (fault,) = ppo_faults("actor=pretrained", f"actor.model.path={tmp_path}")
    assert fault.startswith("actor.model.path is")
    assert "not a model directory" in fault


@pytest.mark.parametrize("node", ["reward", "data", "tracker.console"])
def test_a_component_of_another_kind_is_refused_where_it_stands(node):
    config = compose_root("ppo")
    apply_values(config, [(node, {"_target_": "verl.algorithms.kl.NoKL"})])
    with pytest.raises(ConfigError, match=f"{node} is NoKL.*: expected a component with _target_ of kind"):
        validate(config)


# Numbers are finite, and the columns that a reward reads are there


@pytest.mark.parametrize("value", ["nan", *exhaustive("inf", "-inf")])
@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("rollout.temperature", []),
        ("rollout.kv_cache_gib", ["rollout=vllm"]),
        ("trainer.success_score", []),
        ("actor.optimizer.lr", []),
        ("algorithm.advantage.lam", ["algorithm=ppo"]),
        ("checkpoint.save_interval_s", []),
        ("reward.correct", []),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_its_value(key, options, value):
    (fault,) = [fault for fault in ppo_faults(*options, f"{key}={value}") if fault.startswith(key)]
    assert fault == f"{key} is {value}: must be finite."


def _refusals(kind, name, value):
    """What the type of a field alone says against a value."""
    values = dict.fromkeys(field_types(kind), INVALID) | {name: value}
    return [fault for fault in set_fields(object.__new__(kind), values) if fault.startswith(name)]


def test_no_component_of_the_package_takes_a_float_that_is_not_finite_unless_it_says_so():
    for module in pkgutil.walk_packages(verl.__path__, "verl."):
        if not any(part in module.name for part in (".vllm.server", ".ray", ".hosts.", "__main__")):
            importlib.import_module(module.name)
    kinds, seen = [Description], []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if not kind.__module__.startswith("verl."):
            continue
        for name, annotation in field_types(kind).items():
            for form in (float, lambda x: (x,), lambda x: (x, x), lambda x: {"a": x}):
                if "Any" not in str(annotation) and any(not _refusals(kind, name, form(x)) for x in (0.5, 2.0)):
                    seen.append(name)
                    for x in (math.nan, math.inf):
                        faults = _refusals(kind, name, form(x))
                        assert faults, (kind, name)
                        assert all(fault.endswith(f"is {x}: must be finite.") for fault in faults), faults
    assert len(set(seen)) > 60
    assert {"temperature", "kv_cache_gib", "betas", "weights"} <= set(seen)


RULE = """
def score(prompts, responses, gold, level=0):
    return [0.0 for _ in responses]


def one(prompt, response, gold):
    return 0.0


def judged(reply, gold):
    return 0.0
"""


@pytest.fixture
def questions(tmp_path):
    """Overrides of a run on two files without a column `gold`, and a rule that wants one."""
    (tmp_path / "rule.py").write_text(RULE)
    rows = [json.dumps({"prompt": "1+1=", "answer": "2"})] * 3
    (tmp_path / "train.jsonl").write_text("\n".join([*rows, json.dumps({"prompt": "1+1=", "extra": "2"})]))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "answer": ["2"]}), tmp_path / "eval.parquet")
    files = [f"data.train_files=[{tmp_path}/train.jsonl]", f"data.eval_files=[{tmp_path}/eval.parquet]"]
    return tmp_path / "rule.py", ["data=files", *files]


ENDPOINT = "reward.endpoint.base_url=http://localhost:1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "begins"),
    [
        (["reward.answer_key=gold"], "reward.answer_key is 'gold'"),
        (["reward=math", "reward.answer_key=gold"], "reward.answer_key is 'gold'"),
        (["reward=function", "reward.path=RULE:score"], "reward.path is 'RULE:score', which takes gold"),
        (
            ["reward=function", "reward.path=RULE:one", "reward.per_sample=true"],
            "reward.path is 'RULE:one', which takes gold",
        ),
        (["reward=normalized", "reward.reward.answer_key=gold"], "reward.reward.answer_key is 'gold'"),
        (
            ["reward=remote_chat", ENDPOINT, "reward.model=j", "reward.template='{response} {gold}'"],
            "reward.template has {gold}",
        ),
        (
            ["reward=remote_http", ENDPOINT, "reward.fields={said: response, right: gold}"],
            "reward.fields.right is 'gold'",
        ),
    ],
)
def test_a_column_that_the_reward_reads_and_the_data_lack_is_refused_by_the_reward_s_key(options, begins, questions):
    rule, data = questions
    faults = ppo_faults(*data, *(option.replace("RULE", str(rule)) for option in options))
    begins = begins.replace("RULE", str(rule))
    assert faults == [
        f"{begins}: the rows of data.train_files have no column 'gold'. Their columns: answer, extra.",
        f"{begins}: the rows of data.eval_files have no column 'gold'. Their columns: answer.",
    ]


def test_columns_that_are_there_or_need_not_be_are_no_fault(questions):
    rule, data = questions
    kwargs = ["reward=function", f"reward.path={rule}:score"]
    for options in (["reward.answer_key=answer"], [*kwargs, "+reward.kwargs={gold: 1}"], ["reward=length"]):
        arguments, assigned = command_line("ppo", [*data, *options])
        validate(compose_root("ppo", arguments), assigned.faults)
    (fault,) = ppo_faults("reward.answer_key=gold")  # the built-in problems
    assert fault == "reward.answer_key is 'gold': the rows of data have no column 'gold'. Their columns: answer."
