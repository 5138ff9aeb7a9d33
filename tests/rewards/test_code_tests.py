"""The reward that runs a response's program against the tests of its row."""

import contextlib
import json

import pytest
from cases import exhaustive
from refusals import refusal
from rewards.rated import batch_of

from verl.component import BuildContext
from verl.errors import RewardError
from verl.rewards.code_tests import CodeTests, program_of, read_tests
from verl.sandbox.jail import Jail
from verl.sandbox.unit_tests.run import run_unit_test
from verl.sandbox.unprotected import Unprotected

SANDBOX = Jail(timeout_s=5.0) if not list(Jail().machine_faults()) else Unprotected(timeout_s=5.0)
CASES = [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "5 6", "stdout": "11\n"}]
UNIT = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
SUM = "a, b = map(int, input().split())\nprint(a + b)"


def built(**values):
    return contextlib.closing(CodeTests(**{"sandbox": SANDBOX, **values}).build(BuildContext()))


def rated(responses: list[str], tests: list, **values):
    with built(**values) as reward:
        return reward.score_batch(batch_of(responses, tests=tests))


def test_cases_and_unit_tests_decide_and_outcomes_are_told():
    responses = [
        f"Here it is:\n```python\n{SUM}\n```\nDone.",
        "```\nprint(3)\n```",
        "def add(a, b): return a + b",
        "def add(a, b): return 3",
        "x = [0] * (1 << 34)",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
    ]
    tests = [CASES, json.dumps(CASES), UNIT, UNIT, CASES, UNIT, UNIT]
    result = rated(responses, tests)
    assert result.scores.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert result.parts["tests_passed"].tolist() == [1, 0.5, 1, 0.5, 0, 0, 0]
    assert result.parts["test_timeouts"].tolist() == [0] * 7
    assert result.columns["tests"].tolist() == [
        "pass pass", "pass fail", "pass pass", "pass error", "memory", "fail", "fail"
    ]  # fmt: skip
    endless = rated(["while True: pass"], [CASES], timeout_s=1.0)
    assert (endless.scores.tolist(), endless.columns["tests"].tolist()) == ([0], ["timeout"])
    assert [endless.parts[name].tolist() for name in ("tests_passed", "test_timeouts")] == [[0], [1]]


def test_partial_credit_is_the_share_of_tests_that_pass():
    scores = rated(["print(3)", SUM, "1"], [CASES] * 3, partial_credit=True, correct=2.0, wrong=-1.0).scores
    assert scores.tolist() == [0.5, 2.0, -1.0]


PROGRAM = "def f():\n    return 1"
RESPONSES = {
    "alone": PROGRAM,
    "marked": "Here:\n```python\n@\n```\nDone.",
    "unmarked": "```\n@\n```",
    "marked as py, in capitals": "```PY\n@\n```",
    "after a shell command": "Run:\n```bash\npip install x\n```\n```python\n@\n```",
    "after another program": "```python\nwrong()\n```\nBetter:\n```python\n@\n```",
    "before its output": "```python\n@\n```\nIt prints\n```\n1\n```",
    "before JSON": "```python\n@\n```\n```json\n{}\n```",
    "with attributes": '```python title="a.py"\n@\n```',
    "with a class of Pandoc": "```{.python .numberLines}\n@\n```",
    "in a list": "1. So:\n\n   ```python\n   def f():\n       return 1\n   ```\n2. Done.",
    "in a quotation": "> ```python\n> def f():\n>     return 1\n> ```",
    "with tildes": "~~~python\n@\n~~~",
    "with four marks": "````python\n@\n````",
    "indented by two": "  ```python\n  def f():\n      return 1\n  ```",
    "with line ends of Windows": "```python\r\ndef f():\r\n    return 1\r\n```\r\n",
    "cut off": "```python\n@",
    "in Markdown": "```markdown\n# Answer\n```python\n@\n```\n```",
    "after a thought": "<think>\nPerhaps\n```python\ndraft()\n```\n</think>\n```\n@\n```",
    "after a thought that leaves a block open": "<think>\n```python\ndraft()\n</think>\n```python\n@\n```",
    "after HTML": "<div>\n```python\n@\n```\n</div>",
    "with white space after the mark": "```python  \n@\n```  ",
    "in a thought alone": "```python\n@\n```\n</think>\nDone.",
}


@pytest.mark.parametrize("form", RESPONSES)
def test_the_program_is_found_in_every_form_of_a_response(form):
    assert program_of(RESPONSES[form].replace("@", PROGRAM)).strip() == PROGRAM


def test_a_block_of_another_language_alone_is_no_program():
    assert program_of("```cpp\nint x;\n```") == "```cpp\nint x;\n```"


FORGERIES = {
    "an object that equals everything": "class X:\n    def __eq__(self, other): return True\ndef add(a, b): return X()",
    "a number that equals everything": "class X(int):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return X()",
    "an exit": "import os\ndef add(a, b): os._exit(0)",
    "an exit by exception": "def add(a, b): raise SystemExit(0)",
    "an end at once": "import sys\nsys.exit(0)",
    "the mark in the caller's frame": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n"
    "    while frame:\n        print(frame.f_globals, frame.f_locals, frame.f_code.co_consts)\n"
    "        frame = frame.f_back\n    return 0",
    "the verdict as output": "def add(a, b):\n    print('pass')\n    return 0",
    "a replaced traceback": "import sys, traceback\ntraceback.print_exception = lambda *a: None\n"
    "sys.excepthook = lambda *a: None\ndef add(a, b): return 0",
    "all objects of the process": "import gc\nfor found in gc.get_objects():\n    if isinstance(found, dict):\n"
    "        try: found['add'] = found['fault'] = None\n        except Exception: pass\ndef add(a, b): return 0",
    "replaced built-in names": "len = all = abs = isinstance = lambda *a: True\nAssertionError = KeyError\n"
    "def add(a, b): return 0",
    "another answer than was asked": "import os\ndef add(a, b):\n"
    '    os.write(3, b\'{"result": 3, "found": {"len": {"value": 1}, "total": {"value": 3}}}\\n\')\n'
    "    return 0",
    "its own test": "import sys\nsys.modules['__main__'].__dict__.clear()\ndef add(a, b): return 0",
}
STRICT = "total = add(1, 2)\ntry:\n    assert total == 3 and abs(total) > 2\n    assert len([add(0, 0)]) == 1\n" \
    "    assert add(2, 2) == 4 and add(5, 6) == 11\nexcept ZeroDivisionError:\n    pass"  # fmt: skip


@pytest.mark.parametrize("runner", [SANDBOX], indirect=True)
def test_no_program_passes_a_unit_test_without_solving_it(runner):
    found = {name: run_unit_test(runner, code, STRICT).outcome for name, code in FORGERIES.items()}
    assert "pass" not in found.values(), found
    assert found["an object that equals everything"] == "object"
    assert run_unit_test(runner, "def add(a, b): return a + b", STRICT).outcome == "pass"


SOUND = {  # a program and a test that it passes
    "in place": ("def s(x): x.sort()", "x = [2, 1]\ns(x)\nassert x == [1, 2]"),
    "types of collections": (
        "def f(x): return (x, {1: b'a', (2,): {3}}, frozenset('a'), 1j)",
        "assert f([1, None]) == ([1, None], {1: b'a', (2,): {3}}, frozenset('a'), 1j)",
    ),
    "numbers at their limits": (
        "def f(x): return [x, -x, 10 ** 5000]",
        "assert f(float('inf')) == [float('inf'), -float('inf'), 10 ** 5000]",
    ),
    "texts that are no Unicode": ("def f(x): return x * 2", "assert f('\\ud800') == '\\ud800\\ud800'"),
    "an exception": (
        "class E(ValueError): pass\ndef f(x): raise E('bad', x)",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert error.args == ('bad', 1)\nelse:\n    assert 0",
    ),
    "what it prints": (
        "def f(): print('hi')",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f()\n"
        "assert out.getvalue() == 'hi\\n'",
    ),
    "a constant that changes": ("N = 0\ndef f():\n    global N\n    N += 1", "assert N == 0\nf()\nassert N == 1"),
    "the name of a built-in": ("def sum(a, b): return a * b", "from solution import sum\nassert sum(3, 4) == 12"),
    "a function as an argument of the test's": ("def f(x): return -x", "assert sorted([1, 2], key=f) == [2, 1]"),
    "a check by HumanEval": ("def f(x): return x", "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)"),
    "a module that the program imports": ("import math\ndef f(): return 0.1", "assert math.isclose(f(), 0.1)"),
    "an import of the program": ("def f(): return 1", "from solution import f as g\nassert g() == 1"),
    "unittest": (
        "def f(): return 1",
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(), 1)\nunittest.main()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("runner", [SANDBOX, *exhaustive(Unprotected(timeout_s=5.0))], indirect=True)
def test_a_program_that_solves_a_unit_test_passes_it_from_another_process(runner):
    found = {name: run_unit_test(runner, *case).outcome for name, case in SOUND.items()}
    assert set(found.values()) == {"pass"}, found
    for test in ("assert 1 == 1", "def test_f():\n    assert f(1)", "assert f("):  # they say nothing about a program
        assert run_unit_test(runner, "def f(x): return x", test).outcome in ("fail", "error")


@pytest.fixture
def runner(request):
    built = request.param.build(BuildContext())
    yield built
    built.close()


def test_tests_with_objects_run_in_the_process_of_the_program_where_that_is_allowed():
    program = "class Stack(list):\n    push = list.append\ndef count():\n    yield from range(3)"
    tests = [["s = Stack()\ns.push(1)\nassert s.pop() == 1"], ["assert list(count()) == [0, 1, 2]"]]
    assert rated([program] * 2, tests, allow_in_process=True).scores.tolist() == [1, 1]
    result = rated([program], tests[1:])
    assert (result.scores.tolist(), result.parts["test_objects"].tolist()) == ([0], [1])


def test_tests_that_are_no_python_are_told_with_their_rows_before_the_run():
    with built() as reward:
        (told,) = reward.check_rows("training rows", [{"tests": UNIT}, {"tests": "assert f("}])
        assert told.startswith("1 of 3 unit tests of the training rows are no Python: row 1")
        assert reward.check_rows("training rows", [{"tests": UNIT}, {"tests": CASES}]) == []
        with refusal("tests_key"):
            reward.check_rows("training rows", [{"tests": UNIT}, {"tests": 3}])


def test_a_program_with_characters_that_no_file_holds_fails_its_test():
    assert rated(["def add(a, b): return '\ud800'", "\ud800"], [UNIT, UNIT]).scores.tolist() == [0, 0]


@pytest.mark.slow
def test_forms_of_tests_are_read_and_others_are_refused():
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}, "") == read_tests([{"stdin": "1", "stdout": "2"}], "")
    assert [test.unit for test in read_tests("assert f()", "")] == ["assert f()"]
    assert [test.unit for test in read_tests("[1, 2] == f()\nassert g()", "")] == ["[1, 2] == f()\nassert g()"]
    for wrong in ("", [], None, 3, [{"stdin": 1, "stdout": "2"}], {"inputs": ["1"], "outputs": []}, [[]]):
        with pytest.raises(RewardError, match="column 'tests' of sample 0"):
            rated(["print(1)"], [wrong])


@pytest.mark.slow
def test_a_sandbox_that_fails_is_no_reward(monkeypatch):
    from verl.sandbox.base import ExecutionResult

    made = type(SANDBOX.build(BuildContext()))
    failed = ExecutionResult("infra", detail="no memory for a jail")
    monkeypatch.setattr(made, "execute", lambda self, program: failed)
    monkeypatch.setattr(made, "execute_linked", lambda self, *programs: (failed, failed))
    for tests in (CASES, UNIT):
        with pytest.raises(RewardError, match=r"The sandbox failed.*no memory for a jail"):
            rated(["print(1)"], [tests])
