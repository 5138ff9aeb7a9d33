"""Every command and every Python block of the README and the documents runs.

Blocks are found in the text, so a new one is tested, or refused for want of what it needs, without an edit here.
Commands of training are composed and checked; those of `verl` that look at a run are run on one; what cannot run here
is in NOT_RUN with the reason.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from cli.small_runs import small_run
from random_models import save_random_classifier, save_random_model
from trainer.runs import fit
from typer.testing import CliRunner

from verl.cli.main import app
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.serving.http_api import PolicyServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(ROOT.glob("docs/*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = r"(verl|verl-checkpoint-compat|python|make|ray|pip|git|export|printf|vllm|\.|[A-Z_]+=\S+) "
COMMAND = re.compile(rf"^[$%] |^{PROGRAMS}", re.MULTILINE)

NOT_RUN = {  # the beginning of a command, and why it is not run here
    "git clone": "needs the network",
    "make ": "installs, or runs all tests; the targets are those of the Makefile",
    "pip install": "installs; tests/test_wheel.py installs a wheel",
    ". .venv": "activates an environment",
    "python -m venv": "makes an environment",
    ".venv-verifiers/bin/pip install": "installs",
    "export ": "sets variables of a service",
    "VLLM_SERVER_DEV_MODE=1 vllm serve": "needs a server with a GPU; tests/rollout/server starts one",
    "python scripts/prepare_gsm8k.py": "needs the hub, or its files; tests/scripts/test_prepare_gsm8k.py",
    "verl quickstart": "minutes; tests/test_wheel.py runs its --smoke",
    "verl serve-training": "until Ctrl-C; tests/service/test_serve_training.py runs it",
    "verl resume-check": "a minute and more; tests/cli/test_resume_check.py runs it on a small model",
    "verl checkpoint export outputs/verl/EXPERIMENT/TIME/actor": "needs a LoRA run; tests/cli/test_checkpoint.py",
    "verl checkpoint export outputs/verl/EXPERIMENT/TIME model --push": "needs a hub; tests/cli/test_push_to_hub.py",
    "verl checkpoint ls s3://": "needs a store; tests/cli/test_checkpoint_store.py",
    "verl plan experiment=gsm8k_qwen2_5_0_5b": "of its own model; tests/models/test_known_shapes.py plans it",
    "verl ppo --config-dir": "needs files of one's own; tests/test_wheel.py runs it",
    "verl ppo trainer=mesh trainer.placement.devices=[cuda:0,cuda:1]": "needs two GPUs; tests/trainer runs it on cpu:N",
    "python -m pytest": "runs tests",
    "ray start": "joins machines to a cluster",
    "verl ppo trainer=ray trainer.placement.address=auto sharding=fsdp trainer.nnodes=2": "needs two machines; "
    "tests/faults/test_two_hosts.py has two namespaces",
}
PLACEHOLDERS = {"URL": "http://localhost:8000", "NAME": "judge", "DIR": "model", "RUN_DIR": "outputs/quickstart/ppo"}
NEEDS = {  # what a command takes from the environment
    "storage=s3": ["storage.bucket=models"],
    "data=files": ["data.max_prompt_length=16"],
    "data=sft_files": ["data.max_length=16"],
}


@dataclass(frozen=True)
class Command:
    """A command of a page, with its output where the page shows one."""

    page: str
    text: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text()):
            if found[1] == language:
                yield page.name, found[2]


def commands() -> Iterator[Command]:
    """Lines of blocks without a language that open with a program; below a prompt the rest of a block is output."""
    for page, block in blocks(""):
        joined = block.replace("\\\n", " ")
        if re.match(r"[$%] ", joined):
            for part in re.split(r"^[$%] ", joined, flags=re.MULTILINE)[1:]:
                text, _, output = part.partition("\n")
                yield Command(page, text.strip(), output)
        elif COMMAND.match(joined):
            for line in joined.splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Command(page, re.sub(r"(^|\s)#.*", "", line).strip())


COMMANDS = list(commands())
TRAINING = re.compile(r"verl (ppo|sft|dpo|reward-model)\b")


def kind(command: Command) -> str:
    if any(command.text.startswith(start) for start in NOT_RUN) or " ..." in command.text:
        return "not run"
    if TRAINING.match(command.text):
        return "training"
    if command.text.startswith("verl "):
        return "looking"
    return "script" if command.text.startswith("python scripts/") else "unknown"


def of_kind(name: str) -> list[Any]:
    return [pytest.param(command, id=str(command)) for command in COMMANDS if kind(command) == name]


@pytest.fixture(scope="module")
def made_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the documents name."""
    directory = tmp_path_factory.mktemp("files")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "response": str(n + 1), "solution": "2"} for n in range(64)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train.jsonl", "answers.jsonl", "easy.jsonl", "hard.jsonl", "a.jsonl"):
        (directory / name).write_text(lines)
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (directory / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 64)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "train.parquet")
    save_random_model(directory / "outputs/quickstart/sft/actor", "qwen2", torch.float32)
    rule = "def score(**columns):\n    return [0.0 for _ in columns['responses']]\n\n\nreward = score\n"
    (own,) = [text for page, text in blocks("python") if page == "algorithms.md" and text.startswith("# my.py")]
    for name in ("my.py", "rule.py"):
        (directory / name).write_text(rule + own)
    return directory


@pytest.fixture
def users_files(made_files: Path, tmp_path: Path) -> Path:
    """A working directory with these files."""
    return shutil.copytree(made_files, tmp_path, dirs_exist_ok=True)


def filled(word: str) -> str:
    """An argument with a value for what stands for the reader's own."""
    return re.sub(r"(?<![A-Z_])(URL|NAME|RUN_DIR|DIR)(?![A-Z_])", lambda found: PLACEHOLDERS[found[1]], word)


def single_jobs(words: list[str]) -> Iterator[list[str]]:
    """The jobs of a sweep; the command itself without -m."""
    if "-m" not in words:
        yield words
        return
    rest = [word for word in words if word != "-m"]
    yield from map(
        list, itertools.product(*([f"{w.split('=')[0]}={v}" for v in w.split("=")[1].split(",")] for w in rest))
    )


def refused(root: str, words: list[str]) -> None:
    """Raises what the check of a run raises."""
    root = root.replace("-", "_")
    needed = [need for word in words for need in NEEDS.get(word, []) if need.split("=")[0] not in " ".join(words)]
    arguments, assigned = command_line(root, [*words, *needed])
    assert assigned.faults == [], assigned.faults
    validate(compose_root(root, arguments), assigned.faults)


def test_every_command_is_run_checked_or_named_with_a_reason():
    assert len(COMMANDS) > 80
    assert [str(command) for command in COMMANDS if kind(command) == "unknown"] == []
    used = {start for start in NOT_RUN for command in COMMANDS if command.text.startswith(start)}
    assert set(NOT_RUN) == used
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {c.text.split()[1] for c in COMMANDS if c.text.startswith("make ")} <= targets


@pytest.mark.parametrize("command", of_kind("training"))
def test_a_command_that_trains_composes_and_passes_the_check(command, users_files):
    raw = shlex.split(command.text, posix=False)
    assert [word for word in raw if re.search(r"^[^'\"]*\{[^'\"]*,", word)] == [], "a shell divides what is in braces"
    found = TRAINING.match(command.text)
    assert found is not None
    words = [filled(word) for word in shlex.split(command.text[found.end() :])]
    for job in single_jobs(words):
        if re.match(r"\d+ faults", command.output):
            with pytest.raises(ConfigError) as refusal:
                refused(found[1], job)
            assert str(refusal.value).strip() == command.output.strip()
        elif "--help" not in job:
            refused(found[1], [word for word in job if word not in ("--cfg", "job")])


@pytest.fixture(scope="module")
def finished(model32, tmp_path_factory) -> Path:
    """A working directory with a run that has finished, and a batch that it wrote, where the documents have theirs."""
    directory = tmp_path_factory.mktemp("finished")
    words = [*small_run(model32, directory), "trainer.total_steps=2", "trainer.eval_interval=1"]
    words += ["tracker.tensorboard=null"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for name, more in (("outputs/quickstart/ppo", []), ("outputs/nan", ["debug=nan", "checkpoint=off"])):
            arguments, assigned = command_line("ppo", [*words, *more])
            run = validate(compose_root("ppo", arguments), assigned.faults)
            fit(run, directory / name)
    (directory / "outputs/nan/anomalies").rename(directory / "outputs/quickstart/ppo/anomalies")
    return directory


@pytest.mark.parametrize("command", of_kind("looking"))
def test_a_command_that_looks_at_a_run_is_done_with_it(command, finished, model32, monkeypatch):
    monkeypatch.chdir(finished)
    words = [filled(word) for word in shlex.split(command.text)[1:]]
    own = {
        "eval": ["reward.path=rate.py:variety"],
        "plan": [f"actor.model.path={model32.path}"],
        "serve-policy": ["--port", "0"],
    }.get(words[0], [])
    serve = PolicyServer.serve_forever

    def for_a_moment(server, *arguments, **options):  # a server goes on until a signal
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        serve(server, *arguments, **options)

    monkeypatch.setattr(PolicyServer, "serve_forever", for_a_moment)
    result = CliRunner().invoke(app, [*words, *own])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", of_kind("script"))
def test_a_script_prints_what_the_page_shows(command, users_files, fork_server):
    words = shlex.split(command.text)[1:]
    extra = [] if {"--help", "--dry_run"} & set(words) else ["--dry_run"]
    done = fork_server.run([ROOT / words[0], *words[1:], *extra], users_files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == command.output.strip() or not command.output


# What the reader has when a block of Python begins: by page, and a line that the block has.
ROWS = """
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
reward = lambda prompts, responses, answer: [float(text == right) for text, right in zip(responses, answer)]
other_reward = lambda prompts, responses: [float(len(text)) for text in responses]
"""
BEFORE = {
    ("checkpoints.md", "CheckpointStore("): "import torch\nweight = torch.zeros(2, 3)",
    ("checkpoints.md", "CheckpointWriter("): """
import torch
model = torch.nn.Linear(2, 2)
compute_gradients = lambda: model(torch.ones(1, 2)).sum().backward()
optimizer_step = torch.optim.SGD(model.parameters(), lr=0.1).step
""",
    ("library.md", "HybridActor.from_pretrained"): "import torch\nids = torch.ones(2, 3, dtype=torch.long)\nmask = ids",
    ("library.md", "trainer = Trainer("): ROWS,
    ("library.md", "RewardNormalization("): ROWS
    + """
from verl import Trainer
checkpoints = {"save_dir": "checkpoints/mine"}
sizes = {"rollout_config": {"max_new_tokens": 4, "n": 2}, "train_config": {"prompts_per_step": 4, "total_steps": 3}}
trainer = Trainer(model=MODEL, reward_model=reward, train_dataset=rows, checkpoint_config=checkpoints, **sizes)
trainer.step()
trainer.save_checkpoint()
""",
    ("library.md", "DataPipeline("): ROWS,
    ("scaling.md", "RayPPOTrainer("): ROWS,
    ("scaling.md", "DeviceMesh("): ROWS,
    ("rewards.md", "batch: DataProto"): "from verl.protocol import DataProto",
    ("rewards.md", "check(response"): "check = str.__eq__",
}
# What stands for a model, files and sizes of the reader's own: the block is the same with these in their place.
INSTEAD = {
    '"Qwen/Qwen2-0.5B"': "MODEL",
    '"my/reward-model"': "REWARD_MODEL",
    '"train.parquet"': '"train.jsonl"',
    '"max_new_tokens": 256': '"max_new_tokens": 4',
    "max_new_tokens=64": "max_new_tokens=4",
    '"total_steps": 500': '"total_steps": 2',
    '"prompts_per_step": 32': '"prompts_per_step": 4',
    "RUN_DIR": "outputs/quickstart/ppo",
    "step_7_actor": "step_2_actor",
    "cuda:": "cpu:",
}
PYTHON_ELSEWHERE = {  # by page, and the tests that run its blocks
    "README.md": "test_the_example_of_the_readme_learns",
    "serving.md": "tests/service/test_session.py",
    "extending.md": "tests/test_extending.py",
    "quickstart.md": "tests/examples/test_examples.py",
}


def python_blocks() -> list[Any]:
    shown = []
    for page, block in blocks("python"):
        is_walk = (
            page == "library.md" and block in (ROOT / "docs/library.md").read_text().partition("<!-- /walk -->")[0]
        )
        if page not in PYTHON_ELSEWHERE and not is_walk:
            marks = [pytest.mark.exhaustive] if page == "scaling.md" else []  # starts processes
            shown.append(pytest.param(page, block, id=f"{page}: {block.splitlines()[-1].strip()}", marks=marks))
    return shown


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_a_block_of_python_runs(page, block, finished, users_files, model32, monkeypatch):
    code = block
    for old, new in INSTEAD.items():
        code = code.replace(old, new)
    if "RUN_DIR" in block:
        monkeypatch.chdir(finished)
    if "REWARD_MODEL" in code:
        save_random_classifier(users_files / "reward", "qwen2")
    short = {
        "actor_rollout": {"model_name_or_path": model32.path},
        "data": {"max_prompt_length": 16, "max_response_length": 4, "train_batch_size": 4},
        "trainer": {"total_training_steps": 1},
    }
    (users_files / "config.yaml").write_text(yaml.safe_dump(short))
    names: dict[str, Any] = {"MODEL": model32.path, "REWARD_MODEL": str(users_files / "reward")}
    for text in [before for (of, line), before in BEFORE.items() if of == page and line in block]:
        exec(compile(text, "before", "exec"), names)
    try:
        exec(compile(code, page, "exec"), names)
    finally:  # what a reader's interpreter would close as it ends
        for value in [x for x in names.values() if type(x).__module__.startswith("verl.")]:
            getattr(value, "close", lambda: None)()


def test_the_example_of_the_readme_learns(capsys):
    (block,) = [text for page, text in blocks("python") if page == "README.md" and "Trainer" in text]
    exec(compile(block, "README.md", "exec"), {})
    first, last = map(float, re.findall(r"step \d+: ([\d.]+)", capsys.readouterr().out))
    assert first < 0.2
    assert last > 0.95


def test_every_yaml_block_is_readable():
    assert all(yaml.safe_load(text) for _, text in blocks("yaml"))
