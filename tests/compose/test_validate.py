"""The check of a configuration: every fault at once, each by its path."""

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
from refusals import ANY, TESTS, refusal, refused

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


def cart(front=None, **fields):
    wheel = {"_target_": f"{HERE}.Wheel", "radius_m": 1.0}
    fields["front"] = wheel | (front or {})
    return {"_target_": f"{HERE}.Cart", **fields}


def wheel(**fields):
    return {"_target_": f"{HERE}.Wheel", **fields}


def check(config, *known):
    return validate(OmegaConf.create(config), list(known))


def of(*known, **fields):
    """What checks a cart."""
    return lambda: check(cart(**fields), *known)


def of_ppo(*arguments: str):
    """What checks a run of PPO."""

    def checked():
        hydra_arguments, assigned = command_line("ppo", arguments)
        return validate(compose_root("ppo", hydra_arguments), assigned.faults)

    return checked


def ppo_faults(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        of_ppo(*arguments)()
    return caught.value.faults


def test_a_sound_configuration_becomes_its_description():
    made = Wheel(radius_m=1.0, spokes=(1, 2))
    assert check(cart(back="${front}", load_kg=3, front={"spokes": [1, 2]})) == Cart(front=made, back=made, load_kg=3)


WIDE = wheel(radius_m=2.0)
SEVERAL = ["algorithm.advantage.lam=1.5", "algorithm.advantage.gama=1", "trainer.total_steps=abc", "actor=lama8b"]
SEVERAL += ["rollout.temprature=1", "actor.optimizer.lr=fast"]
SEVERAL_PATHS = ("actor=lama8b", "actor.optimizer.lr", "rollout.temprature", "algorithm.advantage.gama")
test_a_fault_is_told_by_its_path_with_all_others = refused(
    ("lod_kg", "load_kg?", of(lod_kg=1)),
    ("radius", "front.radius_m?", of(radius=1)),  # the nearest key may lie in another component
    ("zzz", "Cart", of(zzz=1)),
    (("back.radius_m", "riders"), "wide", of(riders="many", back=wheel(radius_m="wide"))),
    (("back.radius_m", "riders", "load_kg"), "many", of(load_kg=-1, riders="many", back=wheel(radius_m=0))),
    # `back` cannot be compared with `front`; only what was written before that is told of the cart
    (("front.radius_m", "load_kg"), -1.0, lambda: check(cart(back=WIDE, load_kg=-1) | {"front": wheel()})),
    ("front.radius_m", -1.0, of(back="${front}", front={"radius_m": -1.0})),  # once, where it is written
    (("load_kg", "riders", "back"), "${back}", of(load_kg="${nowhere.at.all}", riders="${riders}", back="${back}")),
    ("load_kg", "load_kg=...", of(load_kg="???")),
    ("back", {"radius_m": 1}, of(back={"radius_m": 1})),
    (("foo", "riders"), 0, of("foo is not a key.", riders=0)),
    ((*SEVERAL_PATHS, "algorithm.advantage.lam", "trainer.total_steps"), "llama8b?", of_ppo(*SEVERAL)),
    (("trainer.group_size",), 1, of_ppo("algorithm=grpo", "trainer.group_size=1")),
    ("critic", None, of_ppo("critic=none")),
    ("critic", None, of_ppo("critic=null")),
    ("data.train_files[0]", "/no.jsonl", of_ppo("data.train_files=[/no.jsonl]", "rollout.max_new_tokens=4")),
    ("actor.model.path", ANY, of_ppo("actor=pretrained", f"actor.model.path={TESTS.parent}/.ci")),
    first=6,
)


@pytest.mark.parametrize("target", ["nomodule.Wheel", f"{HERE}.Whel", "fractions.Fraction", "Wheel", 5])
def test_a_wrong_target_is_named_and_its_neighbours_are_still_checked(target):
    with refusal("back._target_", "riders", value=target):
        check(cart(back={"_target_": target, "radius_m": 1}, riders="many"))


def test_two_nodes_that_contain_each_other_are_a_fault_and_no_endless_walk():
    with pytest.raises(ConfigError, match="contains itself"):
        check(cart(back=wheel(radius_m=1.0, spokes="${front}"), front={"spokes": "${back}"}))


@pytest.mark.parametrize("node", ["reward", "data", "tracker.console"])
def test_a_component_of_another_kind_is_refused_where_it_stands(node):
    config = compose_root("ppo")
    apply_values(config, [(node, {"_target_": "verl.algorithms.kl.NoKL"})])
    with refusal(node, value="NoKL"):
        validate(config)


# Numbers are finite, and the columns that a reward reads are there


@pytest.mark.first_rows(3)
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
    assert fault.startswith(f"{key} is {value}: ")


def test_no_component_of_the_package_takes_a_float_that_is_not_finite_unless_it_says_so():
    def refusals(kind, name, value):
        values = dict.fromkeys(field_types(kind), INVALID) | {name: value}  # the type of this field alone
        return [fault for fault in set_fields(object.__new__(kind), values) if fault.startswith(name)]

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
                if "Any" not in str(annotation) and any(not refusals(kind, name, form(x)) for x in (0.5, 2.0)):
                    seen.append(name)
                    for x in (math.nan, math.inf):
                        faults = refusals(kind, name, form(x))
                        assert faults, (kind, name)
                        assert all(f"is {x}: input should be a finite number" in fault for fault in faults), faults
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
    ("options", "key"),
    [
        (["reward.answer_key=gold"], "reward.answer_key"),
        (["reward=math", "reward.answer_key=gold"], "reward.answer_key"),
        (["reward=function", "reward.path=RULE:score"], "reward.path"),
        (["reward=function", "reward.path=RULE:one", "reward.per_sample=true"], "reward.path"),
        (["reward=normalized", "reward.reward.answer_key=gold"], "reward.reward.answer_key"),
        (["reward=remote_chat", ENDPOINT, "reward.model=j", "reward.template='{response} {gold}'"], "reward.template"),
        (["reward=remote_http", ENDPOINT, "reward.fields={said: response, right: gold}"], "reward.fields.right"),
    ],
)
def test_a_column_that_the_reward_reads_and_the_data_lack_is_refused_by_the_reward_s_key(options, key, questions):
    rule, data = questions
    with refusal(key, key, value="gold"):
        of_ppo(*data, *(option.replace("RULE", str(rule)) for option in options))()


def test_columns_that_are_there_or_need_not_be_are_no_fault(questions):
    rule, data = questions
    kwargs = ["reward=function", f"reward.path={rule}:score"]
    for options in (["reward.answer_key=answer"], [*kwargs, "+reward.kwargs={gold: 1}"], ["reward=length"]):
        of_ppo(*data, *options)()
    with refusal("reward.answer_key", value="gold"):  # of the built-in problems
        of_ppo("reward.answer_key=gold")()
