"""Write the golden results: what each of a few short runs comes to, and checkpoints that some of them go on from.

    tests/golden/results/NAME/expected.json    the metrics of each step without times, and a digest of the final weights
    tests/golden/results/NAME/checkpoints/     for the runs of `KEPT`: the checkpoint after step `KEPT_STEP`

A later version must come to the same, bit by bit on the same kind of machine, else to rounding, and must go on from
each kept checkpoint to the same. A run is made twice; metrics in which the two differ are left out and named.

Example: python scripts/make_golden_results.py tests/golden/results            all of them
         python scripts/make_golden_results.py tests/golden/results grpo sft   some
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.models.pretrained import quiet_transformers
from verl.models.tiny import character_tokenizer
from verl.trainer.state.compare_runs import steps_of

ROOT = Path(__file__).resolve().parents[1]
KEPT_STEP = 2
REWARD = "def variety(prompts, responses):\n    return [len(set(response)) for response in responses]\n"
COMMON = ["trainer.num_threads=1", "trainer.device=cpu", "tracker.tensorboard=null"]
TINY = [
    *COMMON,
    *("actor=pretrained", "actor.model.path=model", "actor.optimizer.lr=1e-3", "data.digits=1", "data.held_out=2"),
    *("data.train_size=12", "trainer.prompts_per_step=4", "trainer.total_steps=4", "trainer.eval_interval=2"),
    *("checkpoint=sync", "checkpoint.save_interval=1", "checkpoint.keep_last_n=null"),
    *("checkpoint.save_dir=checkpoints", "hydra.run.dir=run"),
]
RL = [*TINY, "rollout.max_new_tokens=6", "reward=function", "reward.path=reward.py:variety"]
GRPO = [*RL, "algorithm=grpo"]
SFT = [
    *COMMON,
    *("actor=pretrained", "actor.model.path=model", "actor.optimizer.lr=1e-3", "data.digits=1", "data.held_out=2"),
    *("data.train_size=12", "trainer.batch_size=4", "trainer.total_steps=4", "trainer.eval_interval=2"),
    *("checkpoint=sync", "checkpoint.save_interval=1", "checkpoint.keep_last_n=null"),
    *("checkpoint.save_dir=checkpoints", "hydra.run.dir=run"),
]


class GoldenRun(NamedTuple):
    """A run, by its main script and command line.

    Args:
        hidden: size of the random model that it starts from; None: of none.
        before: a run of another script in the same directory, whose results are not kept.
    """

    overrides: list[str]
    script: str = "main_ppo.py"
    hidden: int | None = 16
    before: tuple[str, ...] = ()


RUNS = {
    "quickstart": GoldenRun(
        [
            *COMMON,
            *("actor.model.path=sft/actor", "trainer.total_steps=30", "trainer.eval_interval=10"),
            *("hydra.run.dir=run", "checkpoint=off"),
        ],
        hidden=None,
        before=("main_sft.py", "hydra.run.dir=sft", *COMMON, "checkpoint=off"),
    ),
    "grpo": GoldenRun(GRPO),
    "grpo_lora": GoldenRun([*GRPO, "actor.lora={_target_:verl.models.lora.LoRA,rank:2}"]),
    "fsdp": GoldenRun(
        [*RL, "algorithm=ppo", "critic.optimizer.lr=1.0e-5", "sharding=fsdp", "trainer.n_gpus_per_node=2"]
    ),
    "tp_fsdp": GoldenRun([*GRPO, "sharding=tp_fsdp", "sharding.tensor_parallel=2", "trainer.n_gpus_per_node=4"]),
    "vllm": GoldenRun([*GRPO, "rollout=vllm", "rollout.kv_cache_gib=0.05", "rollout.num_threads=1"], hidden=64),
    "replay_incremental": GoldenRun(
        [
            *GRPO,
            *("replay=tiered", "replay.max_rows=40", "replay.memory_mib=8", "replay.shard_mib=1"),
            *("algorithm.replay_fraction=0.5", "algorithm.replay_max_staleness=null"),
            *("checkpoint=incremental", "checkpoint.save_interval=1", "checkpoint.keep_last_n=null"),
            "checkpoint.save_dir=checkpoints",
        ]
    ),
    "sft": GoldenRun(SFT, script="main_sft.py"),
}
KEPT = ("grpo_lora", "fsdp", "replay_incremental")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where results are written, each below its name")
    parser.add_argument("names", nargs="*", default=list(RUNS), help=f"of {', '.join(RUNS)}; all by default")
    options = parser.parse_args(arguments)
    for name in options.names:
        if (options.directory / name).exists():
            parser.error(
                f"{options.directory / name} exists: what was recorded once is to be met by every later version"
            )
        record(name, options.directory / name)
    return 0


def record(name: str, target: Path) -> None:
    """Make a run twice and write what both came to."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second = play(name, Path(one)), play(name, Path(other))
        if first["weights"] != second["weights"]:
            raise SystemExit(f"{name}: two runs of the same came to different weights")
        varying = {
            key
            for step, numbers in first["steps"].items()
            for key, x in numbers.items()
            if second["steps"][step].get(key) != x
        }
        for numbers in first["steps"].values():
            for key in varying:
                numbers.pop(key, None)
        target.mkdir(parents=True)
        if name in KEPT:
            kept = f"checkpoints/global_step_{KEPT_STEP}"
            shutil.copytree(Path(one) / kept, target / kept)
            shutil.copytree(Path(one) / "model", target / "model")
    expected = {"machine": machine(), "varying": sorted(varying), **first}
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{name}: {len(first['steps'])} steps, {size / 1024:.0f} KiB, varying: {sorted(varying) or 'nothing'}")


def play(name: str, directory: Path, *further: str, here: bool = False) -> dict[str, Any]:
    """Make a run in a directory; returns the metrics of its steps, and the digest of the weights that it ends with.

    Args:
        here: in this process, whose working directory must be `directory`; else by the main script in one of its own.
    """
    run = RUNS[name]
    if run.hidden is not None and not (directory / "model").exists():
        write_model(directory / "model", run.hidden)
    (directory / "reward.py").write_text(REWARD)
    if run.before:
        _start([*run.before], directory)
    if here:
        _fit(run, [*run.overrides, *further], directory)
    else:
        _start([run.script, *run.overrides, *further], directory)
    steps = {str(step): _steady(numbers) for step, numbers in steps_of(directory / "run").items()}
    return {"steps": steps, "weights": digest(directory / "run")}


def _start(command: list[str], directory: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / command[0]), *command[1:]],
        cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")


def _fit(run: GoldenRun, overrides: list[str], directory: Path) -> None:
    from verl.component import BuildContext
    from verl.compose.compose import compose_root
    from verl.compose.overrides import command_line
    from verl.compose.validate import validate

    root = run.script.removeprefix("main_").removesuffix(".py")
    arguments, assigned = command_line(root, [o for o in overrides if not o.startswith("hydra.")])
    described = validate(compose_root(root, arguments), assigned.faults)
    with described.build(BuildContext(run_dir=directory / "run")) as trainer:
        trainer.fit()


def _steady(numbers: dict[str, float]) -> dict[str, float]:
    """Without what a clock or the memory of a machine says."""
    return {key: x for key, x in numbers.items() if not key.endswith(("_s", "_per_s", "_mib", "_gib"))}


def digest(run_dir: Path) -> str:
    """Of every tensor that the run left as weights, in the order of their names."""
    found = hashlib.blake2b(digest_size=20)
    files = [f for role in ("actor", "critic") for f in sorted((run_dir / role).glob("*.safetensors"))]
    if not files:
        raise SystemExit(f"{run_dir} holds no weights")
    for file in files:
        found.update(file.relative_to(run_dir).as_posix().encode())
        for key, tensor in sorted(load_file(file).items()):
            found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()


def machine() -> dict[str, str]:
    """What must be the same for results that are equal bit by bit. Processors of one name may differ in their
    instruction sets, and with them in the order of sums."""
    found = {"processor": platform.processor(), "torch": torch.__version__}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name in ("model name", "cpu family", "model"):
                found["processor" if name == "model name" else name] = value
    return found


def write_model(directory: Path, hidden: int) -> None:
    """A random Qwen2 of one layer with two heads for keys and values, and the character tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer: Any = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def golden_directories(directory: Path) -> Iterator[Path]:
    """Every recorded result."""
    yield from sorted(path.parent for path in directory.glob("*/expected.json"))


if __name__ == "__main__":
    sys.exit(main())
