"""The examples for Slurm, KubeRay and SkyPilot and the Dockerfile: they parse, and each run in them composes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from cli.small_runs import hold_once, small_run

from verl.checkpoint.manager import CheckpointManager
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("slurm/*.sbatch"))
VALUES = {  # of variables, as a cluster has them
    "address": "10.0.0.1", "PORT": "6379", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "verl", "SHARED": "/shared",
    "MODEL": "Qwen/Qwen2.5-0.5B-Instruct", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "HOME": "/home/me",
}  # fmt: skip


def ray_job() -> dict:
    claim, job = yaml.safe_load_all((EXAMPLES / "kuberay/rayjob.yaml").read_text())
    assert claim["kind"] == "PersistentVolumeClaim"
    return job


def sky_task() -> dict:
    return yaml.safe_load((EXAMPLES / "skypilot/train.yaml").read_text())


def texts() -> dict[str, str]:
    """What a shell runs, by example."""
    found = {script.name: script.read_text() for script in SCRIPTS}
    return found | {"rayjob": ray_job()["spec"]["entrypoint"], "skypilot": sky_task()["run"]}


@pytest.mark.parametrize("example", texts())
def test_each_run_composes_passes_the_check_and_resumes(example, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_BUCKET", "my-bucket")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "answer": ["2"]}), tmp_path / "train.parquet")
    text = texts()[example].replace("\\\n", " ").replace("[/data/", f"[{tmp_path}/")
    (settings,) = re.findall(r"^run=\((.*)\)$", text, re.MULTILINE) or [""]
    (command,) = re.findall(r"\bverl (ppo .*?)(?:&|$)", text, re.MULTILINE)
    for name, value in VALUES.items():
        command = re.sub(rf"\$(?:{name}\b|{{{name}}})", value, command)
    root, *words = shlex.split(command.replace('"${run[@]}"', settings))
    assert "resume=latest" in words
    assert [word for word in words if "$" in word] == []
    arguments, assigned = command_line(root, words)
    assert assigned.faults == []
    run = validate(compose_root(root, arguments), [])
    assert run.checkpoint.save_dir.startswith(("/shared/", "/checkpoints/", "/home/me/"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_bash_and_shellcheck_finds_nothing(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_pods_share_image_checkpoints_and_memory():
    cluster = ray_job()["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    (container,) = {
        str([c["image"], c["volumeMounts"], c["resources"]]) for p in pods for c in p["template"]["spec"]["containers"]
    }
    assert "'mountPath': '/checkpoints'" in container
    words = dict(word.split("=", 1) for word in ray_job()["spec"]["entrypoint"].split() if "=" in word)
    assert int(words["trainer.nnodes"]) == 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    pinned = (ROOT / "requirements-dev.lock").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in pinned


def test_the_job_of_skypilot_goes_on_after_a_signal_and_its_checkpoints_are_not_on_a_mounted_bucket():
    task = sky_task()
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]
    assert not any(f"save_dir={mount}" in task["run"] for mount in task["file_mounts"])


def test_the_image_installs_pinned_libraries_before_the_source_and_runs_as_nobody_in_particular():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    source = lines.index("COPY --chown=verl:verl . .")
    assert all(n < source for n, line in enumerate(lines) if "-r requirements.txt" in line)
    assert "USER 1000" in lines[:source]
    named = set(re.findall(r"requirements[\w-]*\.(?:txt|lock)", "\n".join(lines)))
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".venv", "outputs", "checkpoints"} <= set(ignored)


SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" >> "$REQUESTS"\n'


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


SAVES = "trap 'sleep 0.2; echo saved >> log; exit 143' TERM\necho waits >> log\nwhile true; do sleep 0.05; done\n"


@pytest.mark.parametrize(
    ("driver", "status", "requests"),
    [("exit 0\n", 0, []), ("exit 3\n", 3, []), (SAVES, 143, ["requeue 7"])],
    ids=["finished", "failed", "told to end"],
)
def test_the_script_for_several_nodes_waits_for_the_save_and_puts_back_only_what_was_told_to_end(
    driver, status, requests, tmp_path
):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("ray", "#!/bin/bash\n")):
        program(tmp_path / "bin" / name, text)
    program(tmp_path / "bin/verl", f"#!/bin/bash\n{driver}")
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "REQUESTS": str(tmp_path / "requests"), "START_S": "0",
    }  # fmt: skip
    job = subprocess.Popen(["bash", EXAMPLES / "slurm/several_nodes.sbatch"], env=environment, cwd=tmp_path)
    if requests:
        until(lambda: (tmp_path / "log").exists(), job)
        until(lambda: catches(job.pid, signal.SIGTERM), job)  # it sets its trap after it has started the driver
        job.send_signal(signal.SIGTERM)
    assert job.wait(60) == status
    told = tmp_path / "requests"
    assert (told.read_text().splitlines() if told.exists() else []) == requests
    if requests:
        assert (tmp_path / "log").read_text() == "waits\nsaved\n"


@pytest.mark.exhaustive
def test_a_job_at_its_time_limit_is_saved_put_back_and_goes_on(model32, tmp_path):
    """The script for one node with the real command; srun runs it here, and scontrol keeps what it was asked."""
    programs = tmp_path / "bin"
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program(programs / name, text)
    program(programs / "verl", f'#!/bin/bash\nexec {sys.executable} -m verl.cli "$@"\n')
    saved, requests = tmp_path / "shared/checkpoints/job", tmp_path / "requests"
    hold = hold_once(saved / "global_step_2/COMMIT", tmp_path)
    words = [*small_run(model32, tmp_path), "trainer.total_steps=60", "checkpoint.save_interval=2"]
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SHARED": str(tmp_path / "shared"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "REQUESTS": str(requests), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = ["bash", EXAMPLES / "slurm/one_node.sbatch", *words]
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
        until(lambda: (saved / "global_step_2/COMMIT").exists(), job)
        (child,) = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        os.kill(child, signal.SIGTERM)
        hold.unlink()
        assert job.wait(60) == 143, (tmp_path / "log").read_text()
        assert requests.read_text() == "requeue 7\n"
        stopped = CheckpointManager(saved).step
        assert 2 < stopped < 60
        again = subprocess.run(command, env=environment, cwd=tmp_path, stdout=log, stderr=log, timeout=120)
    assert again.returncode == 0
    assert requests.read_text() == "requeue 7\n"  # not again
    assert CheckpointManager(saved).step == 60
    assert f"global_step_{stopped}" in (tmp_path / "log").read_text()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def until(is_so, job: subprocess.Popen, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
