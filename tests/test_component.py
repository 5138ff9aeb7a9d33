"""Descriptions check themselves, have one identity, and travel; errors travel too."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PositiveFloat, PositiveInt
from refusals import refusal

from verl import errors
from verl.component import BuildContext, Description, MaybeInfinite, UnitInterval, as_plain, component, field_types
from verl.errors import (
    BadCheckpoint,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointFenced,
    CheckpointIncomplete,
    CheckpointNotFound,
    CheckpointReadFailed,
    CheckpointTooNew,
    CheckpointWriteFailed,
    ComponentExit,
    ComponentHung,
    ConfigError,
    DataProtoValidationError,
    FileFault,
    LogProbGapError,
    NoGradients,
    NonFiniteError,
    NoSpaceForCheckpoint,
    ObjectDamaged,
    ObjectNotFound,
    OutputFailed,
    ReplayCorrupt,
    ReplayError,
    RewardError,
    RolloutError,
    SandboxError,
    StorageError,
    StorageRefused,
    StorageUnreachable,
    VerlError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
    WorkerHung,
)


@component
class Inner(Description):
    """A part."""

    rate: float = 0.1


@component
class Outer(Description):
    """A whole with a field of every kind that the configuration can hold."""

    size: int = 1
    rate: float = 1.0
    name: str = "x"
    on: bool = True
    cap: float | None = None
    part: Inner | None = None
    schedule: Literal["constant", "linear"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    targets: tuple[str, ...] = ()
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    items: list[int] = dataclasses.field(default_factory=list)
    place: Path | None = None
    anything: Any = None

    def faults(self) -> Iterator[str]:
        if self.size < 0:
            yield f"size is {self.size}: must be at least 0."
        if self.rate > 1:
            yield f"rate is {self.rate}: must be at most 1."


WRONG_TYPES = [  # field and value, and what is blamed if not the field
    ("size", 1.5), ("size", True), ("size", None), ("rate", "fast"), ("rate", False), ("rate", [0.1]), ("name", 3),
    ("on", 1), ("cap", "none"), ("part", {"rate": 0.1}), ("schedule", "cosine"), ("betas", [0.9]),
    ("betas", (0.9, 0.99, 0.999)), ("targets", "q_proj"), ("weights", {1: 1.0}), ("items", (1, 2)),
    ("betas", ("a", 1), "betas[0]"), ("betas", ("a", "b"), "betas[0]", "betas[1]"),
    ("targets", ["q_proj", 1], "targets[1]"), ("weights", {"a": "b"}, "weights.a"),
    ("groups", {"a": ["b", 1]}, "groups.a[1]"), ("items", [1, "2"], "items[1]"), ("anything_else", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "paths"), [(*row[:2], row[2:] or row[:1]) for row in WRONG_TYPES], ids=str)
def test_a_value_of_the_wrong_type_is_named_by_its_own_path(field, value, paths):
    with refusal(*paths):
        Outer(**{field: value})


@component
class Bound(Description):
    """A field that says that it may be infinite."""

    most: MaybeInfinite = float("inf")
    least: MaybeInfinite | None = None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_is_finite_unless_its_field_says_otherwise(value):
    places = {"rate": value, "cap": value, "betas": (0.9, value), "weights": {"a": 1.0, "b": value}}
    for path, (field, given_value) in zip(("rate", "cap", "betas[1]", "weights.b"), places.items(), strict=True):
        with refusal(path, value=value):
            Outer(**{field: given_value})
    made = Bound(most=value, least=1)
    assert repr(made.most) == repr(value)
    assert (made.least, type(made.least)) == (1.0, float)
    with refusal("most"):
        Bound(most="x")  # type: ignore[arg-type]


def test_all_faults_are_told_at_once_those_of_value_where_what_they_read_is_sound():
    with refusal("size", "rate", "name"):
        Outer(size="a", rate="b", name=1)
    with refusal("size", "rate"):
        Outer(size=-1, rate=2.0)
    with refusal("rate", "size"):
        Outer(size=-1, rate="b")


def test_a_list_from_yaml_becomes_the_declared_tuple():
    made = Outer(betas=[0, 1], targets=["q", "v"], groups={"main": ["a"]})
    assert made.groups == {"main": ("a",)}
    assert made.betas == (0.0, 1.0)
    assert made.targets == ("q", "v")
    assert all(isinstance(beta, float) for beta in made.betas)


def test_descriptions_that_are_equal_have_one_identity():
    pairs = [
        (Outer(rate=1), Outer(rate=1.0)),
        (Outer(cap=3), Outer(cap=3.0)),
        (Outer(betas=[0, 1]), Outer(betas=(0.0, 1.0))),
        (Outer(weights={"a": 1, "b": 2}), Outer(weights={"b": 2.0, "a": 1.0})),
        (Outer(part=Inner(rate=1)), Outer(part=Inner(rate=1.0))),
    ]
    for left, right in pairs:
        assert left == right
        assert left.identity() == right.identity()


def test_a_difference_in_any_field_or_class_changes_the_identity():
    @component
    class Twin(Inner):
        pass

    different = [
        Outer(),
        Outer(size=2),
        Outer(rate=0.5),
        Outer(part=Inner()),
        Outer(part=Inner(rate=0.2)),
        Outer(part=Twin()),
    ]
    different += [Outer(name="1"), Outer(targets=("1",)), Outer(items=[1]), Outer(on=False), Outer(place=Path("a"))]
    assert len({made.identity() for made in different}) == len(different)


def test_the_identity_is_the_same_in_another_process_with_another_hash_seed():
    code = "from verl.component import BuildContext, Description; print(Description().identity())"
    root = Path(__file__).resolve().parents[1]
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == Description().identity()


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 2**70),
    st.lists(st.text(), max_size=3),
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_a_description_survives_pickling_with_its_identity(cap, size, targets, weights):
    made = Outer(cap=cap, size=size, targets=targets, weights=weights, part=Inner())
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.identity() == made.identity()


class Marked(Inner):
    """A subclass without a decorator and without fields of its own."""


@dataclass(frozen=True, kw_only=True)
class ByHand(Description):
    """A description that the standard decorator made."""

    rate: PositiveFloat = 1
    sizes: tuple[int, ...] = ()
    part: Inner | None = None

    def faults(self) -> Iterator[str]:
        if len(self.sizes) > 2:
            yield f"sizes is {self.sizes}: at most 2."


def test_components_and_objects_in_fields_stay_the_same_objects():
    part, anything = Marked(rate=1), [object(), {"a": [1]}]
    made = Outer(part=part, anything=anything)
    assert made.part is part
    assert made.anything is anything
    assert anything[1] == {"a": [1]}
    again = dataclasses.replace(made, size=3)
    assert (again.size, again.part, again.anything) == (3, part, anything)
    assert again.part is part
    assert again == Outer(part=Marked(rate=1.0), anything=anything, size=3)
    assert len({Inner(), Inner(), Inner(rate=1)}) == 2
    assert type(pickle.loads(pickle.dumps(part))) is Marked


def test_a_description_made_by_the_standard_decorator_is_checked_alike():
    part = Inner()
    made = ByHand(rate=2, sizes=[1, 2], part=part)
    assert (made.rate, type(made.rate), made.sizes) == (2.0, float, (1, 2))
    assert made.part is part
    assert type(made) is ByHand
    assert pickle.loads(pickle.dumps(made)) == made
    assert type(ByHand().rate) is float
    with refusal("rate", "sizes"):
        ByHand(rate=0, sizes=[1, 2, 3])


def test_a_missing_and_an_unknown_key_are_faults_as_others_are():
    @component
    class Needs(Description):
        size: PositiveInt
        name: str = ""

    with refusal("size", "name", "sise"):
        Needs(sise=1, name=2)  # type: ignore[call-arg]


@component
class Rules(Description):
    """Rules across fields, some of which read a field that is at fault."""

    low: PositiveInt = 1
    high: PositiveInt = 2
    mode: Literal["a", "b"] = "a"
    extra: int | None = None
    share: UnitInterval = 0.5
    names: tuple[str, ...] = ()
    auto: Literal["auto"] | PositiveInt = "auto"

    def faults(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"low is {self.low}: above high."
        if not self.low < self.high:
            yield "low is not below."
        if self.mode == "b" and self.extra is None:
            yield "extra is null: mode=b needs it."
        if "," in "".join(sorted(self.names)):
            yield "names has a comma."
        if self.extra is not None and self.extra > 9:
            yield f"extra is {self.extra}: at most 9."


@pytest.mark.parametrize(
    ("values", "paths"),
    [
        ({"low": 3}, ["low", "low"]),
        ({"low": 0, "mode": "b"}, ["low"]),  # the rules begin with low
        ({"low": 3, "mode": 1}, ["mode", "low", "low"]),
        ({"low": 0, "mode": "c"}, ["low", "mode"]),
        ({"high": None, "extra": 10}, ["high"]),
        ({"share": 1.5, "extra": 10}, ["share", "extra"]),
        ({"auto": 0}, ["auto"]),
        ({"names": [1], "low": 3}, ["names[0]", "low", "low"]),
    ],
)
def test_rules_across_fields_are_told_up_to_the_first_that_reads_a_value_at_fault(values, paths):
    with refusal(*paths):
        Rules(**values)


@pytest.mark.exhaustive
def test_no_validator_is_built_before_a_component_is_made():
    code = "import verl.rollout.vllm.config as m; print(type(vars(m.VLLMRollout)['__pydantic_validator__']).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "MockValSer"


def test_the_plain_form_is_json_with_targets_at_every_level():
    plain = as_plain(Outer(part=Inner(), place=Path("a/b"), targets=("q",)))
    assert plain["_target_"] == f"{__name__}.Outer"
    assert plain["part"] == {"_target_": f"{__name__}.Inner", "rate": 0.1}
    assert plain["place"] == "a/b"
    assert plain["targets"] == ["q"]


def test_a_description_cannot_be_changed_and_takes_no_positions():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().rate = 0.2
    with pytest.raises(TypeError):
        Inner(0.2)


def test_a_pure_component_is_its_own_running_thing():
    inner = Inner()
    assert inner.build(BuildContext()) is inner


def test_field_types_are_the_resolved_annotations():
    assert field_types(Inner) == {"rate": float}


EXAMPLES = [
    ComponentExit("reward() at line 3 of my.py raised SystemExit(0)"),
    ComponentHung("reward() at line 3 of my.py did not return."),
    ConfigError("size is 1: must be 2."),
    ConfigError(["a is 1.", "b is 2."]),
    DataProtoValidationError("Field `values` breaks its contract."),
    RewardError("returned None"),
    NonFiniteError("the loss is nan"),
    WorkerError(1, "actor.update", 7, "Traceback ...\n"),
    WorkerDied(0, "critic.values", None, "exit status -9"),
    WorkerHung(0, "actor.update", 3, "no answer within 60 s"),
    SandboxError("the sandbox was closed"),
    RolloutError("the engine died twice in a row"),
    NoGradients("optim_step has no gradients"),
    OutputFailed("standard output cannot be written"),
    LogProbGapError("the engine's log-probs are not the trainer's", 0.6, 0.1),
    WeightSyncError(["lm_head.weight"], ["lm_head.weight is stale"], 26, 0.5),
    WeightSyncError([], [], 26, 0.5, 1e-4),
    *(
        kind(Path("global_step_7"), [FileFault("actor/model.safetensors", "it is missing", ("actor/w",))])
        for kind in (BadCheckpoint, CheckpointIncomplete, CheckpointCorrupt)
    ),
    CheckpointTooNew(Path("global_step_7"), [FileFault("manifest.json", "it is of format 9.0")]),
    CheckpointNotFound("there is none"),
    CheckpointFenced("taken over by run 7"),
    CheckpointReadFailed("opening failed"),
    CheckpointWriteFailed("writing failed"),
    NoSpaceForCheckpoint("1 GiB free"),
    *(kind("s3://models/run") for kind in (ObjectNotFound, ObjectDamaged, StorageRefused, StorageUnreachable)),
    ReplayError("replay= is off"),
    ReplayCorrupt("rows_0.arrow is of another length"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_text_and_facts(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_of_verl_is_a_verl_error_and_a_standard_one_and_has_an_example_here():
    families = {VerlError, CheckpointError, StorageError}
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VerlError)
    } - families
    assert kinds == {type(error) for error in EXAMPLES}
    for kind in kinds:
        assert issubclass(kind, (ValueError, RuntimeError, FloatingPointError, OSError))
    assert issubclass(WorkerDied, WorkerError)


def test_a_worker_error_says_rank_call_step_and_the_workers_own_traceback():
    assert str(WorkerError(1, "actor.update", 7, "boom\n")) == "rank 1 failed in actor.update at step 7:\nboom"
    assert str(WorkerError(0, "actor.load", None, "boom")) == "rank 0 failed in actor.load:\nboom"
