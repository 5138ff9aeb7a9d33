"""Tests and measurements on GPUs in one command: `make gpu`. Writes benchmarks/results/gpu.json after each part.

    python benchmarks/gpu.py                tests of tests/gpu, then the measurements below
    python benchmarks/gpu.py --no-install   likewise with the packages that are here: what cannot be imported is skipped
    python benchmarks/gpu.py --dry          what would run here, what would be skipped and why; one GPU is assumed where
                                            there is none, and measurements run small, on the CPU
    python benchmarks/gpu.py --table        seconds of whole steps alone, in less than nine minutes: GRPO on random
                                            models of the shapes of SmolLM2-135M and of a Qwen2 of 1.5B by verl and,
                                            where it is installed, by TRL, with vLLM and without

A part is a file of tests or a measurement. Each is a process of its own with a limit of seconds; one that fails or
hangs costs the others nothing. The exit status is 0 if no part failed and at least one test passed, 1 otherwise, and 2
where nothing was started.

Measured: tokens of a training step per second and the share of the device's rate of products, decode steps with and
without CUDA graphs beside the time in which the weights can be read once, the share of sampling in a decode step, how
long an asynchronous save holds training up.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Without this folder: `gpu` is a folder of the tests, too
sys.path[:] = [str(ROOT), str(ROOT / "tests"), *(path for path in sys.path if Path(path).resolve() != HERE)]
RESULT = HERE / "results" / "gpu.json"
PART_LIMIT_S = 150.0
LIMIT_S = 570.0  # of all parts
TABLE_LIMIT_S = 530.0
FINISHED = "finished"  # the last line of a report
NOTHING_COLLECTED = 5  # an exit status of pytest
# Distributions that others need and no machine may have; antlr4 has no wheel, so that one has to be built.
CARRIED_WITH = {
    "hydra-core": ("omegaconf", "antlr4-python3-runtime", "packaging"),
    "omegaconf": ("antlr4-python3-runtime", "PyYAML"),
    "pydantic": ("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"),
    "markdown-it-py": ("mdurl",),
    "rich": ("markdown-it-py", "mdurl", "pygments"),
    "typer": ("annotated-doc", "pydantic", "rich", "shellingham"),
    "httpx": ("anyio", "certifi", "h11", "httpcore", "idna"),
    "peft": ("accelerate", "packaging", "psutil", "PyYAML"),
    "accelerate": ("packaging", "psutil", "PyYAML"),
    "pytest": ("iniconfig", "packaging", "pluggy", "pygments"),
}
EXACT = {"antlr4-python3-runtime": "4.9.3", "pydantic-core": ""}


@dataclass(frozen=True)
class Part:
    """A file of tests, or a measurement.

    Attributes:
        arguments: of this script, in the process of the part.
    """

    name: str
    arguments: tuple[str, ...]


def parts(*, is_dry: bool = False, is_table: bool = False) -> list[Part]:
    """All of them: files of tests/gpu, then measurements; or the rows of the table."""
    collect, small = (("--collect",), ("--small",)) if is_dry else ((), ())
    if is_table:
        return [Part(name, ("--measure", name, *small)) for name in TABLE]
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    found = [Part(file.stem, ("--tests", str(file), *collect)) for file in files]
    return found + [Part(f"measure {name}", ("--measure", name, *small)) for name in MEASURED]


def run_part(part: Part, limit_s: float) -> dict[str, Any]:
    """Run a part in a process group of its own.

    Returns:
        `outcome` (passed, failed, skipped), the exit status (None: stopped at the limit), seconds, `found`: what the
        part reported until then, and `why` it did not pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report", Path(folder) / "output"
        command = [sys.executable, str(Path(__file__).resolve()), *part.arguments, "--report", str(report)]
        start = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_group(process)
        seconds = round(time.monotonic() - start, 1)
        lines = report.read_text().splitlines() if report.exists() else []
        found = dict(json.loads(line) for line in lines)
        text = output.read_text(errors="replace")
    has_finished = found.pop(FINISHED, None) is not None
    if status == 0 and not (has_finished and found):
        return {"outcome": "failed", "exit_status": 0, "seconds": seconds, "why": "no test was run", "found": found}
    outcome, why = judged(status, found, text, limit_s)
    return {"outcome": outcome, "exit_status": status, "seconds": seconds, "why": why, "found": found}


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a part and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judged(status: int | None, found: dict[str, Any], text: str, limit_s: float) -> tuple[str, str]:
    """The outcome of a part, and why it did not pass."""
    if status is None:
        return "failed", f"it was stopped after {limit_s:g} s"
    if status == NOTHING_COLLECTED:
        return "failed", "it has no test that could be run"
    if status:
        missing = re.search(r"No module named '([\w.]+)'", text)
        if missing and missing[1].partition(".")[0] not in ("verl", "gpu"):
            return "skipped", f"there is no module {missing[1]} here"
        return "failed", text.strip()[-2000:]
    reasons = sorted({told["why"] for told in found.values() if told.get("outcome") == "skipped"})
    if found and all(told.get("outcome") == "skipped" for told in found.values()):
        return "skipped", "; ".join(reasons)
    return "passed", "; ".join(reasons)


def run_all(out: Path, *, is_dry: bool, part_limit_s: float = PART_LIMIT_S, is_table: bool = False) -> dict[str, Any]:
    """Run all parts; what is known is written after each, unless it is a dry run."""
    result: dict[str, Any] = {"hardware": hardware(), "packages": packages(), "parts": {}}
    end = time.monotonic() + (TABLE_LIMIT_S if is_table else LIMIT_S)
    for part in parts(is_dry=is_dry, is_table=is_table):
        left = end - time.monotonic()
        if left > 0:
            found = run_part(part, min(part_limit_s, left))
        else:
            found = {"outcome": "failed", "why": f"the parts before it took {LIMIT_S:g} s", "found": {}}
        result["parts"][part.name] = found
        tell(part.name, found)
        if not is_dry:
            out.parent.mkdir(parents=True, exist_ok=True)
            written = out.with_name(f"{out.name}.part")
            written.write_text(json.dumps(result, indent=1) + "\n")
            written.replace(out)
    return result


def tell(name: str, found: dict[str, Any]) -> None:
    """Print the outcome of a part, and of a dry run which of its tests would run."""
    tests = [told for told in found["found"].values() if "outcome" in told]
    counts = {kind: sum(told["outcome"] == kind for told in tests) for kind in OUTCOMES}
    numbers = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    outcome = "would run" if counts["would run"] and found["outcome"] == "passed" else found["outcome"]
    print(f"{name}: {outcome}{f' ({numbers})' if numbers else ''}", flush=True)
    for line in (found["why"].splitlines() or [""])[-6:] if found["why"] else []:
        print(f"    {line}", flush=True)


OUTCOMES = ("passed", "failed", "skipped", "would run")


def outcomes_of(result: dict[str, Any]) -> set[str]:
    return {part["outcome"] for part in result["parts"].values()}


def exit_status(result: dict[str, Any], *, is_dry: bool = False) -> int:
    """0 if no part failed, and at least one test passed (in a dry run: would run)."""
    wanted = "would run" if is_dry else "passed"
    outcomes = [told.get("outcome") for part in result["parts"].values() for told in part["found"].values()]
    has_failed = any(part["outcome"] == "failed" for part in result["parts"].values())
    return int(has_failed or wanted not in outcomes)


def packages() -> dict[str, str]:
    """The requirements that are not met here: what there is in their place."""
    from verl.utils.env_check import REQUIREMENTS, installed, is_new_enough

    found = {needed.name: (needed.oldest, installed(needed.name)) for needed in REQUIREMENTS}
    found["pytest"] = ("8", installed("pytest"))
    return {
        name: "is not installed" if here is None else f"{here} is older than {oldest}"
        for name, (oldest, here) in found.items()
        if here is None or not is_new_enough(here, oldest)
    }


def wheels(missing: Sequence[str]) -> list[str]:
    """The distributions to carry to a machine without a registry, those that the missing ones need included."""
    from verl.utils.env_check import REQUIREMENTS, installed

    tested = {needed.name: needed.tested for needed in REQUIREMENTS} | EXACT
    names = list(dict.fromkeys(missing))
    for name in names:  # it grows meanwhile
        names += [other for other in CARRIED_WITH.get(name, ()) if other not in names and installed(other) is None]
    return [f"{name}=={tested[name]}" if tested.get(name) else name for name in names]


def tell_packages(lacking: dict[str, str]) -> None:
    """Print which requirements are not met, and how to bring what is missing."""
    for name, why in lacking.items():
        print(f"{name}: {why}")
    missing = [name for name, why in lacking.items() if why == "is not installed"]
    if missing:
        print("On a machine with a registry, of the same Python and platform, build all wheels (antlr4 has none):")
        print(f"    pip wheel --no-deps -w wheels {' '.join(wheels(missing))}")
        print("Then here:")
        print("    pip install --no-index --no-deps wheels/*.whl")


class Outcomes:
    """A pytest plugin: writes what becomes of each test, and why one is skipped, into a file, a line each.

    Args:
        collects: tests are not run; what the marks say is written.
    """

    def __init__(self, report: Path, *, collects: bool):
        self.report, self.collects = report, collects

    def write(self, name: str, told: dict[str, Any]) -> None:
        with self.report.open("a") as file:
            file.write(json.dumps([name, told]) + "\n")

    def pytest_itemcollected(self, item: Any) -> None:
        if self.collects:
            reasons = [mark.kwargs["reason"] for mark in item.iter_markers("skipif") if mark.args and mark.args[0]]
            told = {"outcome": "skipped", "why": reasons[0]} if reasons else {"outcome": "would run"}
            self.write(item.nodeid, told)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            told = {"outcome": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
            if report.skipped:
                told["why"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
            elif report.failed:
                told["why"] = str(report.longrepr)[-2000:]
            self.write(report.nodeid, told)


def run_tests(file: str, report: Path, *, collects: bool) -> int:
    """Run the tests of a file, or collect them, in this process. Returns the exit status of pytest."""
    import pytest

    arguments = [file, "-q", "-p", "no:cacheprovider", *(["--collect-only"] if collects else [])]
    outcomes = Outcomes(report, collects=collects)
    status = int(pytest.main(arguments, plugins=[outcomes]))
    outcomes.write(FINISHED, {})
    return status


def hardware() -> dict[str, Any]:
    """What the numbers are measured on, asked in another process: this one opens no CUDA context."""
    asked = [sys.executable, str(Path(__file__).resolve()), "--hardware"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}


def hardware_here() -> dict[str, Any]:
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return {**found, "count": 0}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    memory = round(properties[0].total_memory / 2**30, 1)
    return {**found, "device": properties[0].name, "count": len(properties), "memory_gib": memory}


def settle(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Any, device: str, repeats: int) -> float:
    """Seconds of one of several repetitions, after one that warms up."""
    work()
    settle(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    settle(device)
    return (time.perf_counter() - start) / repeats


def product_rate(device: str, small: bool) -> float:
    """Floating-point operations per second of a large matrix product in bfloat16."""
    import torch

    size = 256 if small else 8192
    x, y = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timed(lambda: x @ y, device, 10)


def read_rate(device: str, small: bool) -> float:
    """Bytes per second of a large copy, read and written."""
    import torch

    source = torch.empty(2**20 if small else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), device, 10)


def sized_model(small: bool) -> Any:
    """The shape of a model of 1.3 billion parameters, with a small vocabulary."""
    from verl.models.tiny import TinyModel

    if small:
        return TinyModel(hidden_size=64, intermediate_size=128)
    return TinyModel(hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, context_length=2048)


def training(device: str, small: bool) -> dict[str, float]:
    """An update of a model in bfloat16 over float32 weights, rows packed."""
    import torch
    from roles import start_actor, with_experience

    from verl.protocol import DataProto
    from verl.rollout.hf import HFRollout
    from verl.utils.seeding import seed_everything

    seed_everything(0)  # deterministic kernels are demanded, as in a run
    length, rows = (16, 4) if small else (512, 64)
    rollout = HFRollout(max_new_tokens=length)
    actor = start_actor(sized_model(small), rollout, device=device, autocast="bfloat16", gradient_checkpointing=True)
    batch = DataProto.from_dict(made_rows(rows, length, vocabulary=16))
    batch = with_experience(batch, actor)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: actor.update(batch), device, 1 if small else 5)
    tokens, parameters = int(batch["attention_mask"].sum()), float(actor.model.num_parameters())
    computed = tokens - rows // 2 * length  # of two equal prompts one is computed
    operations = 8 * parameters * computed  # forward twice, because of gradient checkpointing, and backward
    found = {"tokens_per_s": tokens / seconds, "seconds": seconds, "parameters": parameters}
    found["share_of_product_rate"] = operations / seconds / product_rate(device, small)
    if device.startswith("cuda"):
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def decoding(device: str, small: bool) -> dict[str, float]:
    """Milliseconds of a decode step of 8, 64 and 256 rows, sampling included, with CUDA graphs and kernel by kernel."""
    from roles import start_actor
    from rollout.engines import random_prompts

    from verl.rollout.base import GenerationRequest
    from verl.rollout.hf import HFRollout
    from verl.utils.seeding import seed_everything

    seed_everything(0)
    length = 4 if small else 64
    rollout = HFRollout(max_new_tokens=length, sleep=False)
    actor = start_actor(sized_model(small), rollout, device=device, autocast="bfloat16")
    engine: Any = actor.generator.engine
    engine.stop_ids = engine.stop_ids[:0]  # all rows have all tokens
    weight_bytes = 2 * sum(p.numel() for p in actor.model.parameters())
    found = {"weights_once_ms": 1e3 * weight_bytes / read_rate(device, small)}
    for name in ("graphs", "kernels"):
        if name == "kernels" and engine.memory is not None:
            engine.memory.graphs.new_graph = None
        for rows in (2,) if small else (8, 64, 256):
            prompts = random_prompts(rows, 100)
            actor.generate(prompts, GenerationRequest(0))  # `timed` does it again: graphs are of the second time
            seconds = timed(lambda prompts=prompts: actor.generate(prompts, GenerationRequest(0)), device, 2)
            found[f"{name}_{rows}_rows_ms"] = 1e3 * seconds / length
    return found


def made_rows(rows: int, length: int, vocabulary: int) -> dict[str, Any]:
    """Rows of prompts and responses of one length; half of the rows have two responses to one prompt."""
    import torch

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, vocabulary, (rows, length), generator=generator)
    prompts[1::2] = prompts[::2]
    responses = torch.randint(4, vocabulary, (rows, length), generator=generator)
    ids = torch.cat([prompts, responses], dim=1)
    ones = torch.ones(rows, length, dtype=torch.bool)
    return {
        "prompts": prompts,
        "prompt_mask": ones,
        "responses": responses,
        "response_mask": ones.clone(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(2 * length).expand(rows, -1).clone(),
        "rollout_log_probs": torch.zeros(rows, length),
        "prompt_ids": torch.arange(rows) // 2,
        "sample_ids": torch.arange(rows) % 2,
        "group_ids": torch.arange(rows) // 2,
    }


def sampling(device: str, small: bool) -> dict[str, float]:
    """Drawing a token for each of 256 rows from 128,256, beside the products of a decode step of an 8B model."""
    import torch

    from verl.rollout.token_sampler import TokenSampler

    rows, vocabulary, width, layers = (4, 1000, 64, 2) if small else (256, 128_256, 4096, 32)
    sampler = TokenSampler(0, (0,))
    logits = torch.randn(rows, vocabulary, device=device)
    noise = torch.rand(rows, dtype=torch.float64, device=device)

    def draw() -> None:
        sampler.log_probs(logits, sampler.pick(logits, noise, 1))

    weight = torch.randn(width, 14 * width, device=device, dtype=torch.bfloat16)  # as many numbers as a layer of 8B has
    states = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    drawing = timed(draw, device, 2 if small else 50)
    products = timed(lambda: states @ weight, device, 2 if small else 50) * layers
    return {"seconds": drawing, "share_of_decode_step": drawing / (drawing + products)}


def saving(device: str, small: bool) -> dict[str, float]:
    """How long an asynchronous save holds the trainer up."""
    import torch
    from checkpoint.requests import request

    from verl.checkpoint.commit.store import CheckpointStore
    from verl.checkpoint.save.async_writer import CheckpointWriter

    mib = 4 if small else 4096
    tensors = {f"weight_{i}": torch.randn(mib * 2**20 // 4 // 8, device=device) for i in range(8)}
    with tempfile.TemporaryDirectory() as folder, CheckpointWriter(CheckpointStore(Path(folder))) as writer:
        writer.save(request(1, tensors))
        writer.drain()
        settle(device)
        start = time.perf_counter()
        writer.save(request(2, tensors))
        held = time.perf_counter() - start
        writer.wait_copied()
        copied = time.perf_counter() - start
        writer.drain()
    return {"mib": float(mib), "held_s": held, "copied_s": copied}


@dataclass(frozen=True)
class StepShape:
    """A model by its configuration, and a step of 32 prompts with 8 responses each.

    Attributes:
        new: tokens of a response.
        tokens: of a micro-batch of verl.
        rows: of a micro-batch of TRL.
    """

    config: dict[str, Any]
    new: int
    tokens: int
    rows: int


STEPS, SKIPPED = 6, 2  # of each run, and those at its beginning that are not counted
SHAPES = {
    "135M": StepShape(
        {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
        | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        48, 16384, 256,
    ),
    "1.5B": StepShape(
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
        | {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
        256, 32768, 64,
    ),
}  # fmt: skip
SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def save_random(shape: StepShape, device: str, small: bool, directory: Path) -> str:
    """A model with random weights and the character tokenizer; returns its path."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.models.tiny import character_tokenizer

    tokenizer = character_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = {**shape.config, **(SMALL if small else {}), **ids, "max_position_embeddings": 8192}
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def median(values: Sequence[float]) -> float:
    """Without the first steps."""
    return statistics.median(list(values)[SKIPPED:])


def steps_of_verl(shape: StepShape, engine: str, device: str, small: bool) -> dict[str, float]:
    """Seconds of a step and of its stages, of a run as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        path, run = save_random(shape, device, small, Path(folder) / "model"), Path(folder) / "run"
        command = [
            sys.executable, "main_ppo.py", "actor=pretrained", f"actor.model.path={path}", "critic=none",
            "algorithm=grpo", "reference=none", "algorithm.kl.coef=0", f"rollout={engine}", "data=arithmetic",
            "actor.autocast=bfloat16",
            f"rollout.max_new_tokens={4 if small else shape.new}", f"trainer.total_steps={STEPS}", "checkpoint=off",
            f"trainer.prompts_per_step={2 if small else 32}", f"trainer.group_size={2 if small else 8}",
            f"actor.micro_batch_tokens={shape.tokens}", "trainer.eval_before=false", f"trainer.device={device}",
            f"hydra.run.dir={run}", *(["rollout.max_num_seqs=256"] if engine == "vllm" else []),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    keys = sorted({key for step in steps for key in step if key.startswith("timing/") or key == "sync/proof_s"})
    return {key: median([step.get(key, 0.0) for step in steps]) for key in keys}


def steps_of_trl(shape: StepShape, engine: str, device: str, small: bool) -> dict[str, float]:
    """Seconds of a step and of its generation: the same rows, loss, optimizer and types."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    rows, group = (4, 2) if small else (256, 8)
    micro, took, generated = min(rows, shape.rows), [], []
    with tempfile.TemporaryDirectory() as folder:
        path = save_random(shape, device, small, Path(folder) / "model")

        class Watch(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                settle(device)
                self.start = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                settle(device)
                took.append(time.perf_counter() - self.start)

        vllm: dict[str, Any] = {} if engine == "hf" or small else {"use_vllm": True, "vllm_mode": "colocate"}
        if vllm:
            vllm |= {"vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 512}
            vllm["vllm_importance_sampling_correction"] = False
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(path),
            train_dataset=Dataset.from_list([{"prompt": f"what is {n}+{n + 7}?"} for n in range(STEPS * rows)]),
            reward_funcs=[lambda completions, **_: [float(len(text) % 2) for text in completions]],
            callbacks=[Watch()],
            args=trl.GRPOConfig(
                output_dir=folder, use_cpu=device == "cpu", bf16=True, max_steps=STEPS, beta=0.0, loss_type="grpo",
                per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro, num_generations=group,
                max_completion_length=4 if small else shape.new, optim="adamw_torch" if small else "adamw_torch_fused",
                gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True, **vllm,
            ),
        )  # fmt: skip
        generate = trainer._generate

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            settle(device)
            start = time.perf_counter()
            made = generate(*args, **kwargs)
            settle(device)
            generated.append(time.perf_counter() - start)
            return made

        trainer._generate = timed_generate
        trainer.train()
    return {"timing/step_s": median(took), "timing/gen_s": median(generated)}


TABLE = {
    f"{size} {program} {engine}": functools.partial(work, SHAPES[size], engine)
    for size, engine in (("135M", "vllm"), ("1.5B", "vllm"), ("135M", "hf"))
    for program, work in (("verl", steps_of_verl), ("trl", steps_of_trl))
}
MEASURED = {"training": training, "decoding": decoding, "sampling": sampling, "saving": saving}


def measure(name: str, report: Path | None, *, small: bool) -> dict[str, float]:
    """Make a measurement in this process; small ones run on the CPU."""
    found = (MEASURED | TABLE)[name]("cpu" if small else "cuda:0", small)
    if report is not None:
        report.write_text("".join(json.dumps(line) + "\n" for line in ([name, found], [FINISHED, {}])))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="list what would run here, what is skipped and why")
    parser.add_argument("--no-install", action="store_true", help="run with the packages that are here, of any version")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--limit-s", type=float, default=PART_LIMIT_S, help="of each part")
    for name in ("--tests", "--measure", "--report"):  # of a part, in its process
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="seconds of whole steps alone, beside TRL")
    for name in ("--collect", "--small", "--hardware"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hardware:
        print(json.dumps(hardware_here()))
        return 0
    if options.tests:
        return run_tests(options.tests, Path(options.report), collects=options.collect)
    if options.measure:
        measure(options.measure, Path(options.report), small=options.small)
        return 0
    installs, out = not options.no_install, options.out
    if options.table and out == RESULT:
        out = RESULT.with_name("gpu_table.json")
    return run_command(out, is_dry=options.dry, installs=installs, part_limit_s=options.limit_s, is_table=options.table)


def run_command(
    out: Path, *, is_dry: bool, installs: bool, part_limit_s: float = PART_LIMIT_S, is_table: bool = False
) -> int:
    """Run all parts, or say what is in the way."""
    lacking = packages()
    tell_packages(lacking)
    if lacking and installs and not is_dry:
        print("Requirements are not met: nothing was run. Install them, or run what can run with --no-install.")
        return 2
    if is_dry:
        os.environ.setdefault("VERL_ASSUMED_GPUS", "1")
    elif not (found := hardware()).get("count"):
        print("make gpu needs a CUDA device, and torch finds none here: nothing was run, nothing was written.")
        print(found.get("error", ""))
        return 2
    result = run_all(out, is_dry=is_dry, part_limit_s=part_limit_s, is_table=is_table)
    if not is_dry:
        print(f"written to {out}")
    status = exit_status(result, is_dry=is_dry) if not is_table else int("failed" in outcomes_of(result))
    if status:
        print("A part failed, or no test could be run: see above.")
    return status


if __name__ == "__main__":
    sys.exit(main())
