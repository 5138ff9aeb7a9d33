"""The wheel works without the checkout: in an empty environment and an empty directory.

The environment has links to the libraries of this one but the optional ones; verl itself comes from the wheel alone.
"""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
CODE = (".py", ".yaml", ".json", ".css", ".js", ".typed")
OPTIONAL = ("wandb", "tensorboard", "math_verify")
MODEL = ("actor=tiny_scratch", "actor.model.hidden_size=16", "actor.model.intermediate_size=32")
GRPO = ("algorithm=grpo", "algorithm.kl.coef=0", "critic=none", "reference=none", "trainer.prompts_per_step=4")
TINY = (*MODEL, *GRPO, "debug=smoke", "tracker=none")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(copied_source(tmp_path_factory), tmp_path_factory)


def copied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, or would add, so that nothing else of this directory helps; outside of a git checkout
    what a distribution has."""
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=False, capture_output=True).stdout
    files = [name for name in names.split(b"\0") if name and (ROOT / os.fsdecode(name)).is_file()]
    if not files:
        own = [path for name in ("verl", "conf") for path in (ROOT / name).rglob("*") if path.suffix in CODE]
        own += [path for path in ROOT.iterdir() if path.is_file()]
        files = [os.fsencode(path.relative_to(ROOT)) for path in own]
    packed = subprocess.run(
        ["tar", "cf", "-", "--null", "-T", "-"], cwd=ROOT, check=True, capture_output=True, input=b"\0".join(files)
    )
    subprocess.run(["tar", "xf", "-"], cwd=source, check=True, input=packed.stdout)
    return source


def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(build, check=True, env=without_checkout())
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if not item.name.lower().replace("-", "_").startswith(("verl", "__editable__", "_virtualenv", *OPTIONAL)):
            (libraries / item.name).symlink_to(item)
    install = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True, env=without_checkout())
    return place / "bin"


def without_checkout(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"} | more


def run(commands: Path, *words: str) -> str:
    """Run a command of the environment in the working directory, which is empty at first."""
    env = without_checkout(VERL_CACHE=str(Path.cwd() / "cache"))
    done = subprocess.run([commands / words[0], *words[1:]], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_wheel_holds_every_module_and_option_and_names_its_ranges_and_extras(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "verl").rglob("*.py")}
    expected |= {f"verl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    data = [path for suffix in ("json", "css", "js") for path in (ROOT / "verl").rglob(f"*.{suffix}")]
    expected |= {"verl/py.typed", *(path.relative_to(ROOT).as_posix() for path in data)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert [line for line in required if "==" in line or ">=" not in line] == []
    extras = {line.removeprefix("Provides-Extra: ") for line in text.splitlines() if line.startswith("Provides-Extra")}
    assert {"vllm", "ray", "s3", "wandb", "dev", "all"} <= extras
    assert not any(name in line for line in required for name in ("wandb", "tensorboard", "math-verify"))


@pytest.mark.exhaustive
def test_the_name_of_the_distribution_is_one_setting_and_the_import_stays(tmp_path_factory):
    source = copied_source(tmp_path_factory)
    package = source / "verl/__init__.py"
    package.write_text(package.read_text().replace('__distribution__ = "verl"', '__distribution__ = "acme-rl"'))
    wheel = built(source, tmp_path_factory)
    assert wheel.name.startswith("acme_rl-0.")
    metadata = zipfile.ZipFile(wheel).read(f"{wheel.name.rsplit('-', 3)[0]}.dist-info/METADATA").decode()
    assert "\nName: acme-rl\n" in metadata
    code = "import verl, verl.errors; print(verl.__file__, verl.errors.install_command('ray'), sep=chr(10))"
    run = [sys.executable, "-S", "-c", code]
    env = without_checkout(PYTHONPATH=str(wheel))
    shown = subprocess.run(run, env=env, capture_output=True, text=True, cwd=source.parent, check=True).stdout
    assert shown.splitlines() == [f"{wheel}/verl/__init__.py", 'pip install "acme-rl[ray]"']


@pytest.mark.exhaustive
def test_the_quickstart_trains_from_the_wheel_alone(commands):
    code = "import verl; from verl.compose.schema import conf_dir; print(verl.__file__, conf_dir(), sep=chr(10))"
    places = run(commands, "python", "-c", code).splitlines()
    assert all(place.startswith(str(commands.parent)) for place in places), places
    shown = run(commands, "verl", "quickstart", "--smoke")
    assert "$ verl sft" in shown
    assert "after 2 steps of PPO" in shown
    assert json.loads(Path("outputs/quickstart/summary.json").read_text())["accuracy_after"] >= 0
    assert {"sft", "ppo", "summary.json"} == {path.name for path in Path("outputs/quickstart").iterdir()}
    assert Path("outputs/quickstart/ppo/actor/config.json").is_file()
    log = Path("outputs/quickstart/ppo/run.log").read_text()
    assert 'pip install "verl[tensorboard]"' in log


@pytest.mark.exhaustive
def test_own_groups_and_components_of_the_working_directory_are_found(commands):
    Path("my_rewards.py").write_text(
        "from dataclasses import dataclass\n\n"
        "from verl.rewards.rules import Length\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class MyReward(Length):\n"
        '    """A reward of the working directory."""\n'
    )
    for group, name, text in (
        ("reward", "mine", "_target_: my_rewards.MyReward\n"),
        ("experiment", "mine", "# @package _global_\ntrainer: {group_size: 2, seed: 7}\n"),
    ):
        Path("my_conf", group).mkdir(parents=True, exist_ok=True)
        Path("my_conf", group, f"{name}.yaml").write_text(text)
    own = ("--config-dir", "my_conf", "reward=mine", "experiment=mine")
    run(commands, "verl", "ppo", *own, *TINY, "hydra.run.dir=one")
    saved = Path("one/config.yaml").read_text()
    assert "_target_: my_rewards.MyReward" in saved
    assert "seed: 7" in saved
    two = ("sharding=ddp", "trainer.n_gpus_per_node=2", "hydra.run.dir=two")
    run(commands, "verl", "ppo", *own, *TINY, *two)  # in worker processes too
    assert json.loads(Path("two/summary.json").read_text())["steps"] == 2


@pytest.mark.exhaustive
def test_every_other_command_works_without_the_checkout(commands):
    run(commands, "verl", "sft", "actor.model.hidden_size=16", "debug=smoke", "hydra.run.dir=sft")
    run(commands, "verl", "ppo", "actor.model.path=sft/actor", "debug=smoke", "hydra.run.dir=ppo")
    run(commands, "verl", "eval", "ppo")
    run(commands, "verl", "generate", "ppo", "--prompt", "1+2=")
    run(commands, "verl", "lineage")
    run(commands, "verl", "checkpoint", "verify", "checkpoints/verl/ppo_sft")
    assert "OK: " in run(
        commands, "verl", "resume-check", *(word for word in TINY if word[:5] not in ("debug", "track"))
    )
