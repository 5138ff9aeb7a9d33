"""Short runs of every kind come to what an earlier version recorded, and its checkpoints go on to the same.

Bit by bit on the kind of machine that recorded them, else to rounding.
"""

import importlib.util
import json
import shutil

import pytest
from golden_run import GOLDEN, ROOT

from verl.trainer.state.compare_runs import is_of_time

RESULTS = GOLDEN / "results"
_spec = importlib.util.spec_from_file_location("make_golden_results", ROOT / "scripts/make_golden_results.py")
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

ROUNDING = {"quickstart": 0.5}  # between processors: hundreds of updates come before its first numbers
QUICK = ("grpo_lora", "sft")  # the others take processes of their own, an engine or half a minute


def names(selected):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in selected]


def expected_of(name):
    return json.loads((RESULTS / name / "expected.json").read_text())


def assert_as_recorded(found, expected, first_step=0, rounding=1e-4):
    recorded = {step: numbers for step, numbers in expected["steps"].items() if int(step) >= first_step}
    for step, numbers in recorded.items():
        numbers = {key: x for key, x in numbers.items() if not is_of_time(key)}  # as `steps_of` leaves them out
        mine = {key: x for key, x in found["steps"][step].items() if key in numbers}  # there may be further metrics
        if first_step:
            numbers, mine = ({k: x for k, x in part.items() if k in found["steps"][step]} for part in (numbers, mine))
        if script.machine() == expected["machine"]:
            assert mine == numbers, f"step {step}"
        else:
            assert mine == pytest.approx(numbers, rel=rounding, abs=rounding), f"step {step}"
    if script.machine() == expected["machine"]:
        assert found["weights"] == expected["weights"]


def test_every_run_is_recorded():
    assert {path.name for path in script.golden_directories(RESULTS)} == set(script.RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", names(script.RUNS))
def test_a_run_comes_to_what_was_recorded(name, tmp_path):
    if (RESULTS / name / "model").is_dir():
        shutil.copytree(RESULTS / name / "model", tmp_path / "model")
    found = script.play(name, tmp_path, here=name in QUICK)
    assert_as_recorded(found, expected_of(name), rounding=ROUNDING.get(name, 1e-4))


@pytest.mark.parametrize("name", names(script.KEPT))
def test_a_kept_checkpoint_goes_on_to_what_was_recorded(name, tmp_path):
    shutil.copytree(RESULTS / name, tmp_path, dirs_exist_ok=True)
    found = script.play(name, tmp_path, "resume=latest", here=name in QUICK)
    assert min(map(int, found["steps"])) > script.KEPT_STEP
    assert_as_recorded(found, expected_of(name), script.KEPT_STEP + 1)
