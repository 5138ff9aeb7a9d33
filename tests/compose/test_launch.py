"""The main scripts as commands: help, refusals, exit statuses."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import exhaustive
from faults.fork_server import ForkServer

import verl
from verl.checkpoint.ownership import Owner, RunLock
from verl.compose.launch import end_message, help_text
from verl.compose.schema import ROOTS, conf_dir, root_keys
from verl.errors import ConfigError, RewardError

ROOT = conf_dir().parent
HELP = """
import sys
from main_ppo import main
sys.argv = ["main_ppo.py", "--help"]
try:
    main()
except SystemExit:
    pass
heavy = {"torch", "transformers", "numpy", "pyarrow", "wandb", "peft", "matplotlib"} & set(sys.modules)
print("HEAVY AFTER HELP", sorted(heavy))
from verl.compose.validate import validate
from verl.compose.compose import compose_root
validate(compose_root("ppo"))
heavy = {"transformers", "pyarrow", "wandb", "peft", "matplotlib"} & set(sys.modules)
print("HEAVY AFTER CHECK", sorted(heavy))
"""


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """In an interpreter of its own."""
    words = [sys.executable, *arguments]
    env = {**os.environ, **ENVIRONMENT, **(environment or {})}
    return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)


def written(tmp_path: Path, *lines: str, before: str = "", after: str = "") -> str:
    """The path of a script whose main function has these lines."""
    body = "\n    ".join(lines)
    main = f"from verl.compose.launch import entry_point\n@entry_point('sft')\ndef main(job):\n    {body}\n"
    (tmp_path / "script.py").write_text(f"{before}\n{main}{after}\nmain()\n")
    return str(tmp_path / "script.py")


@pytest.fixture
def run_script(fork_server: ForkServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a script in a process that has imported everything already."""
    return lambda *words: fork_server.run(words, tmp_path, {**os.environ, **ENVIRONMENT})


@pytest.mark.slow
def test_help_lists_the_groups_and_neither_help_nor_check_imports_anything_heavy(tmp_path):
    done = run(tmp_path, "-c", HELP)
    assert "      llama1b, llama8b" in done.stdout, done.stderr
    assert "examples" in done.stdout
    assert "HEAVY AFTER HELP []" in done.stdout
    assert "HEAVY AFTER CHECK []" in done.stdout
    groups = help_text("sft").partition("  groups\n")[2].splitlines()[:-3]
    of_sft = dict(line.strip().split(": ") for line in groups if not line.startswith("   "))
    assert of_sft.keys() == {*root_keys("sft")}, "groups that it does not have are not offered"
    assert all(of_sft.values()), "each group has a sentence"
    assert max(len(line) for root in ROOTS for line in help_text(root).splitlines()) <= 80


def without_reader(words: list[str], tmp_path: Path, output: str = "pipe") -> subprocess.CompletedProcess:
    read, write = os.pipe() if output == "pipe" else (os.open(output, os.O_RDONLY), os.open(output, os.O_WRONLY))
    os.close(read)
    with os.fdopen(write, "wb") as lost:
        return subprocess.run(
            [sys.executable, *words], stdout=lost, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
        )


@pytest.mark.parametrize("flags", [["--help"], *exhaustive(["--cfg", "job"])])
def test_a_reader_that_leaves_is_no_error_of_what_is_only_shown(flags, tmp_path):
    done = without_reader([str(ROOT / "main_ppo.py"), *flags], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("output", ["pipe", "/dev/full"])
def test_an_output_that_is_lost_does_not_end_a_run(output, tmp_path):
    lines = ("job.record()", "print('a reward that prints', flush=True)", "sys.stderr.write('it trains')")
    done = without_reader([written(tmp_path, *lines, before="import sys")], tmp_path, output)
    assert (done.returncode, done.stderr) == (0, "it trains")


LONG = "x" * 300
REFUSED = [  # script, words, and a sentence that is told once
    ("ppo", "actor=lama8b trainer.lr=1 trainer.backend=dp3 trainer.seed=-1", "4 faults in the configuration:"),
    ("sft", "trainer.experiment_name=${nowhere}", "nowhere"),
    ("sft", "trainer.project_name=../x", "trainer.project_name is"),
    ("sft", "trainer.seed=[", "trainer.seed"),
    ("sft", "hydra.foo=1", "foo"),
    *(("ppo", f"hydra.run.dir={given}", "hydra.run.dir") for given in ("''", "/", "'~/x'", LONG)),
    ("ppo", "hydra.run.dir=. trainer.seed=no", "trainer.seed is"),
    ("ppo", "hydra.run.dir=a//b/../c trainer.seed=no", "trainer.seed is"),
    ("ppo", "-m algorithm=grpo,gropo trainer.seed=1,2", "algorithm=gropo: no such option"),
    ("sft", "-m hydra.sweeper.params={trainer.seed:1}", "hydra.sweeper.params"),
]


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(("name", "words", "said"), REFUSED)
def test_a_refusal_is_printed_once_without_traceback_with_status_2_and_leaves_no_directory(
    name, words, said, tmp_path, run_script
):
    done = run_script(ROOT / f"main_{name}.py", *words.split())
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not [word for word in ("Traceback", "IndexError", "of the sweep") if word in done.stderr]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_this_machine_lacks_is_refused_before_the_warm_start_and_leaves_nothing(tmp_path):
    arguments = ("trainer.device=cuda:77", "rollout=vllm", "tracker=[console,tensorboard]")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name in ('vllm', 'tensorboard') else find(name, package)\n"
    )
    environment = {"PYTHONPATH": f"{hidden}:{ROOT}", "VERL_CACHE": str(tmp_path / "cache")}
    (tmp_path / "work").mkdir()
    done = run(tmp_path / "work", str(ROOT / "main_ppo.py"), *arguments, environment=environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "trainer.device is 'cuda:77': torch finds" in done.stderr
    assert "tracker.tensorboard needs the package tensorboard, which is not installed" in done.stderr
    assert "rollout=vllm cannot run" in done.stderr
    assert done.stdout == ""  # no configuration before it
    assert list((tmp_path / "work").iterdir()) == []
    assert not (tmp_path / "cache/warm_starts").exists()  # no warm start was made


def test_a_run_that_is_refused_while_it_is_built_leaves_no_directory(tmp_path, run_script):
    lines = ("job.record()", "(job.run_dir / 'plan.txt').touch()", "raise ConfigError('data.x is 1: no.')")
    done = run_script(written(tmp_path, *lines, before="from verl.errors import ConfigError"))
    assert (done.returncode, done.stderr) == (2, "data.x is 1: no.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_a_second_run_is_refused_while_another_writes_into_its_directory(tmp_path, run_script):
    words = (written(tmp_path, "job.record()"), f"hydra.run.dir={tmp_path / 'run'}", "trainer.seed=7")
    lock = RunLock(tmp_path / "run", Owner.here(), "hydra.run.dir")
    assert lock.acquire() is None
    (tmp_path / "run/config.yaml").write_text("of the first\n")
    refused = run_script(*words)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("hydra.run.dir is ")
    assert "hydra.run.dir=DIR" in refused.stderr
    assert (tmp_path / "run/config.yaml").read_text() == "of the first\n"
    lock.release()
    later = run_script(*words)
    assert later.returncode == 0, later.stderr
    assert "seed: 7" in (tmp_path / "run/config.yaml").read_text()
    assert not (tmp_path / "run/run.lock").exists()


FAILING = """
from verl.errors import RewardError, CheckpointError, StorageError, WorkerError

def reward():
    try:
        return 1 / 0
    except ZeroDivisionError as error:
        raise RewardError("The reward function reward() failed.") from error
"""


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("raised", "first", "traces"),
    [
        ("raise", "The reward function reward() failed.", 1),  # of the user's line
        ("raise RuntimeError('boom') from error", "RuntimeError: boom", 1),
        ("raise StorageError('the bucket refuses') from OSError(403)", "the bucket refuses", 0),
        ("raise CheckpointError('no space')", "no space", 0),
        (
            "raise WorkerError(1, 'actor.update', 3, 'Traceback (most recent call last):\\n  a\\nKeyError: 7')",
            "rank 1 failed in actor.update at step 3: KeyError: 7",
            1,
        ),
    ],
)
def test_a_failed_run_says_the_sentence_that_matters_and_then_one_traceback_at_most(
    raised, first, traces, tmp_path, run_script
):
    lines = ("job.record()", "try:", "    reward()", "except RewardError as error:", f"    {raised}")
    done = run_script(written(tmp_path, *lines, before=FAILING))
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == first
    assert (done.stdout + done.stderr).count("Traceback (most recent call last)") == traces
    (log,) = tmp_path.glob("outputs/**/run.log")
    assert log.read_text().count("The run has ended.") == 1


def test_cfg_job_prints_yaml_alone_on_standard_output(tmp_path, run_script):
    done = run_script(str(ROOT / "main_ppo.py"), "trainer.backend=local", "actor=llama8b", "--cfg", "job")
    assert done.returncode == 0
    assert done.stdout.startswith("_target_: verl.trainer.ppo_config.PPORun\n")
    assert done.stderr == "trainer.backend=local became sharding=none\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [("KeyboardInterrupt()", 130, "interrupted"), ("RuntimeError('broken: api_key=abcdefgh12345')", 1, "Traceback")],
)
def test_an_interrupted_or_failed_run_ends_with_its_status_and_tells_no_secret(raised, status, said, tmp_path):
    done = run(tmp_path, written(tmp_path, f"raise {raised}"))
    assert done.returncode == status
    assert said in done.stderr
    assert "abcdefgh12345" not in done.stderr


def test_several_processes_of_torchrun_are_refused_with_what_to_do(tmp_path, run_script, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": 1, "RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    done = run_script(str(ROOT / "main_ppo.py"), "sharding=fsdp", "trainer.no_such_key=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "trainer.n_gpus_per_node=2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_sweep_gives_each_job_its_values_and_directory(tmp_path, run_script):
    lines = ("if job.config.trainer.seed == 5:", "    raise ConfigError('trainer.seed is 5.')", "job.record()")
    told = "print('JOB', job.config.trainer.seed, job.run_dir.relative_to(job.run_dir.parents[3]))"
    script = written(tmp_path, *lines, told, before="from verl.errors import ConfigError")
    done = run_script(script, "-m", "trainer.seed=3,4,5")
    jobs = [line.split() for line in done.stdout.splitlines() if line.startswith("JOB")]
    assert [job[1] for job in jobs] == ["3", "4"], done.stderr
    assert [Path(job[2]).name for job in jobs] == ["0", "1"]
    assert all(job[2].startswith("verl/sft_tiny/") for job in jobs)
    assert len(list(tmp_path.glob("multirun/verl/sft_tiny/*/*/config.yaml"))) == 2
    table = done.stdout[done.stdout.index("Sweep of 3 jobs") :].splitlines()
    assert [line.split()[:3] for line in table[2:5]] == [[str(i), str(i + 3), "not"] for i in range(3)]


@pytest.mark.exhaustive
def test_a_job_that_fails_does_not_end_the_sweep(tmp_path, run_script):
    (tmp_path / "sweep" / "0").mkdir(parents=True)
    for name in ("config.yaml", "overrides.yaml"):  # of another run, which may be running
        (tmp_path / "sweep" / "0" / name).write_text("- trainer.seed=7\n")
    words = ["actor.optimizer.lr=-1,1e-3", "trainer.group_sise=2", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = run_script(str(ROOT / "main_ppo.py"), "-m", *words)
    assert (tmp_path / "sweep/0/overrides.yaml").read_text() == "- trainer.seed=7\n"
    assert "trainer.group_sise=2" in (tmp_path / "sweep/1/overrides.yaml").read_text()
    assert done.returncode == 2
    assert done.stderr.count("group_sise is not a known key") == 2
    assert "Job 0 of the sweep ended with status 2" in done.stderr


class _Link(Exception):
    """An error in a chain of causes."""


def _ring(length: int) -> BaseException:
    links = [_Link(f"link {number}") for number in range(length)]
    for link, below in zip(links, [*links[1:], links[0]], strict=True):
        link.__cause__ = below
    return links[0]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_chain_of_causes_that_is_a_ring_ends_in_a_message(length):
    message = end_message(_ring(length))
    assert message.startswith("_Link: link 0")
    assert f"link {length - 1}" in message
    wrapped = ConfigError("actor.model.path is 'x': no such model.")
    wrapped.__cause__ = _ring(length)
    assert end_message(wrapped).startswith("actor.model.path is 'x'")


def test_a_run_ends_with_one_sentence_at_ctrl_c_again_and_again(tmp_path, run_script):
    end = "os.kill(os.getpid(), signal.SIGINT)"
    late = f"@atexit.register\ndef late():\n    for _ in range(4): {end}; time.sleep(0.01)"
    done = run_script(written(tmp_path, end, "time.sleep(9)", before="import atexit, os, signal, time", after=late))
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("interrupted"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_beside_the_package_whose_name_begins_like_it_is_the_users():
    module: dict = {}
    file = Path(verl.__file__).parents[1] / "verl_rewards.py"
    exec(compile("def rate():\n    return 1 / 0\n", str(file), "exec"), module)
    with pytest.raises(ZeroDivisionError) as caught:
        module["rate"]()
    error = RewardError("The reward function rate() failed.")
    error.__cause__ = caught.value
    assert f'"{file}", line 2, in rate' in end_message(error)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_whose_text_cannot_be_formed_is_told_by_its_type():
    assert end_message(Unprintable()).startswith("Unprintable")
