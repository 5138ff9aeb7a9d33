"""A GRPO step against TRL: the same model, prompts, response lengths, loss and dtype.

    python benchmarks/grpo_step.py --cases longtail
    python benchmarks/grpo_step.py --cases smollm2 --prompts 8 --response 30 --trl-micro 16   # SmolLM2-135M-Instruct

Each side lives in a process of its own; they take turns step by step, so that a busy machine slows both. A step draws
the responses, scores them by a function, and makes one optimizer step (token-mean clipped loss, no reference). TRL
generates by transformers' `generate` and runs at each of the micro-batch sizes given; its fastest one counts. TRL comes
with `pip install ".[bench]"`. Prints a JSON line after each case, the last one with all of them: seconds
per step, medians and quartiles. A case that takes longer than its time is measured in fewer steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import torch
from _progress import Progress

CASES = {
    "fixed": {"lengths": "fixed", "prompt_length": 16, "micro": 1280, "target": 1.5},
    "fixed_bf16": {"lengths": "fixed", "prompt_length": 16, "micro": 2048, "bf16": True, "target": 1.7},
    "longtail": {"lengths": "longtail", "prompt_length": 64, "micro": 2048, "target": 4.3},
    "longtail_vllm": {"lengths": "longtail", "prompt_length": 64, "micro": 2048, "target": 3.5, "vllm": True},
    "long_prompt": {"lengths": "fixed", "prompt_length": 128, "micro": 1280, "target": 3.5},
    "smollm2": {"lengths": "fixed", "prompt_length": 100, "micro": 4096, "bf16": True, "target": 2.0, "end": 2},
}
PLAIN_CASES = tuple(name for name, case in CASES.items() if not case.get("vllm") and name != "smollm2")


class Turns:
    """A side's end of the conversation: it waits for its turn and tells what the turn took."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not be taken for an answer

    def tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.out, flush=True)

    def wait(self) -> bool:
        """Whether another step is wanted."""
        return sys.stdin.readline().strip() == "go"


def peak_mib() -> float:
    """The most memory this process ever held."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def verl_side(options: argparse.Namespace, turns: Turns) -> None:
    """Our trainer, step by step."""
    from verl.algorithms.advantages import GRPO
    from verl.algorithms.algorithm import Algorithm
    from verl.algorithms.importance_sampling import TruncatedIS
    from verl.algorithms.losses import PPOClip
    from verl.component import BuildContext
    from verl.data.files import PromptFiles
    from verl.engines.optimizer import AdamW
    from verl.engines.sharding import NoSharding
    from verl.models.pretrained import Pretrained
    from verl.rewards.function import RewardFunction
    from verl.tracking.base import Trackers
    from verl.trainer.config import PPOSettings
    from verl.trainer.ppo_config import PPORun
    from verl.workers.actor import Actor

    directory = Path(options.model)
    texts = work.prompt_texts(options.prompts, options.prompt_length)
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    counted = work.response_lengths(options.lengths, options.prompts * options.samples, options.response)
    if options.engine == "hf":
        rollout, correction = work.forced_rollout(counted, options.lengths == "longtail", options.samples), None
    else:
        rows = options.prompts * options.samples
        rollout = work.forced_vllm(counted, options.samples, max_num_seqs=rows, max_model_len=512)
        correction = TruncatedIS()  # with and without drawing ahead, so that nothing else differs
    run = PPORun(
        actor=Actor(
            model=Pretrained(path=str(directory)),
            optimizer=AdamW(lr=1e-3),
            micro_batch_tokens=options.micro_batch_tokens,
            autocast="bfloat16" if options.bf16 else None,
        ),
        critic=None,
        reference=None,
        reward=RewardFunction(path="_workload:digit_rewards"),
        rollout=rollout,
        sharding=NoSharding(),
        algorithm=Algorithm(advantage=GRPO(), policy_loss=PPOClip(), correction=correction),
        data=PromptFiles(train_files=(str(file),), max_prompt_length=options.prompt_length),
        trainer=PPOSettings(
            prompts_per_step=options.prompts, group_size=options.samples, total_steps=10_000, device="cpu",
            num_threads=options.threads, mode="async" if options.engine == "ahead" else "sync",
        ),
        tracker=Trackers(),
    )  # fmt: skip
    with run.build(BuildContext(run_dir=directory / f"run_{options.engine}")) as trainer:
        turns.tell(ready_mib=peak_mib())
        step = 0
        while turns.wait():
            start = time.perf_counter()
            step += 1
            metrics = trainer.step(trainer.train_data.collate(trainer.sampler.next_batch()), step)
            took = time.perf_counter() - start
            assert metrics["perf/tokens"] == sum(counted), (metrics["perf/tokens"], sum(counted))
            stages = trainer.stages.take()
            weights = {key: value for key, value in metrics.items() if key.startswith("importance/")}
            generate, update = stages["timing/gen_s"], stages["timing/update_actor_s"]
            turns.tell(step_s=took, generate_s=generate, update_s=update, tokens=sum(counted), **weights)
        turns.tell(peak_mib=peak_mib())


def trl_side(options: argparse.Namespace, turns: Turns) -> None:
    """TRL's trainer, held back between steps by a callback."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TrainerCallback

    rows = options.prompts * options.samples
    counted = work.response_lengths(options.lengths, rows, options.response)
    ends = options.lengths == "longtail"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    generate = model.generate

    def forced_generate(*args: Any, **kwargs: Any) -> Any:
        assert kwargs["input_ids"].shape[0] == rows
        width = kwargs["input_ids"].shape[1]
        lengths = torch.tensor(counted)
        processor: Any = lambda ids, logits: work.forced(logits, lengths, ids.shape[1] - width, ends)  # noqa: E731
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([processor]))

    model.generate = forced_generate

    class TakeTurns(TrainerCallback):
        start = 0.0
        generated_s = 0.0

        def on_step_begin(self, arguments: Any, state: Any, control: Any, **rest: Any) -> None:
            if not turns.wait():
                turns.tell(peak_mib=peak_mib())
                os._exit(0)
            self.start = time.perf_counter()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **rest: Any) -> None:
            took = time.perf_counter() - self.start
            turns.tell(step_s=took, generate_s=self.generated_s, update_s=took - self.generated_s)

    turn = TakeTurns()
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, completions, **_: work.digit_rewards(prompts, completions),
        args=trl.GRPOConfig(
            output_dir=options.model + "/trl", use_cpu=True, bf16=options.bf16, fp16=False,
            per_device_train_batch_size=options.micro, gradient_accumulation_steps=rows // options.micro,
            num_generations=options.samples, max_completion_length=max(counted), num_iterations=1,
            temperature=1.0, top_p=1.0, top_k=0, use_vllm=False, learning_rate=1e-3, lr_scheduler_type="constant",
            warmup_steps=0, max_grad_norm=1.0, beta=0.0, epsilon=0.2, loss_type="dapo", scale_rewards="group",
            max_steps=10_000, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
            gradient_checkpointing=False, dataloader_num_workers=0, log_completions=False,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(
            [{"prompt": t} for t in work.prompt_texts(options.prompts, options.prompt_length)]
        ),
        callbacks=[turn],
    )  # fmt: skip
    inner = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = inner(*args, **kwargs)
        turn.generated_s = time.perf_counter() - start
        return found

    trainer._generate = timed
    turns.tell(ready_mib=peak_mib())
    trainer.train()


class Side:
    """A contender in its own process, as the one that measures sees it."""

    def __init__(self, name: str, model: str, arguments: list[str]):
        self.name, self.steps = name, []
        command = [sys.executable, __file__, "--side", name.split("_")[0], "--model", model, *arguments]
        environment = {
            **os.environ,
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read if the side ends early
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.ready_mib = self._answer()["ready_mib"]

    def take_a_step(self) -> None:
        self.steps.append(self._ask("go"))

    def end(self) -> None:
        self.peak_mib = self._ask("stop")["peak_mib"]
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:  # it has told all that was asked
            self.process.kill()

    def column(self, key: str) -> list[float]:
        return [step[key] for step in self.steps[1:]]  # the first one warms up

    def _ask(self, word: str) -> dict[str, float]:
        print(word, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            self.log.seek(0)
            sys.exit(f"{self.name} ended:\n{self.log.read()[-3000:]}")
        return json.loads(line)


def take_turns(sides: Sequence[Side], rounds: Iterable[int]) -> None:
    """A step of each side in every round; then all of them end."""
    for _ in rounds:
        for side in sides:
            side.take_a_step()
    for side in sides:
        side.end()


def shared_arguments(case: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What all sides of a case are told."""
    shared = ["--lengths", case["lengths"], "--prompt-length", str(case["prompt_length"])]
    shared += ["--bf16"] * case.get("bf16", False) + ["--end", str(case.get("end", work.END))]
    shared += ["--micro-batch-tokens", str(options.micro_batch_tokens or case["micro"])]
    for name in ("prompts", "samples", "response", "threads"):
        shared += [f"--{name}", str(getattr(options, name))]
    return shared


def contenders(case: dict[str, Any], options: argparse.Namespace) -> dict[str, list[str]]:
    """The sides of a case by name, and what each is told beside that."""
    engines = ("vllm", "ahead", "hf") if case.get("vllm") else ("hf",)
    found = {f"verl_{engine}" if engine != engines[0] else "verl": ["--engine", engine] for engine in engines}
    peers = [] if options.alone else options.trl_micro.split(",")
    return found | {f"trl_{micro}": ["--micro", micro] for micro in peers}


def measure(name: str, options: argparse.Namespace, progress: Progress, cases_left: int = 1) -> dict[str, Any]:
    """Seconds per step and memory of all sides in one case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        if name == "smollm2":
            parameters = work.link_smollm2(Path(directory))
        else:
            parameters = work.write_model(Path(directory), options.hidden, options.layers)
        config = json.loads((Path(directory) / "config.json").read_text())
        shared, sides = shared_arguments(case, options), []
        for who, own in contenders(case, options).items():
            progress.say(f"{name}: starting {who}")
            sides.append(Side(who, directory, [*shared, *own]))
        take_turns(sides, progress.rounds(name, options.steps, cases_left))
    result: dict[str, Any] = {"parameters": parameters, "steps": len(sides[0].steps) - 1}
    for side in sides:
        result[side.name] = {key: work.spread(side.column(key)) for key in ("step_s", "generate_s", "update_s")}
        result[side.name] |= {"peak_mib": round(side.peak_mib), "ready_mib": round(side.ready_mib)}
    for side in sides[1:]:
        if side.name.startswith("verl"):
            ratios = [t / o for t, o in zip(side.column("step_s"), sides[0].column("step_s"), strict=True)]
            result[f"times_{side.name}"] = work.spread(ratios, 2)
    if peers := [side for side in sides if side.name.startswith("trl")]:
        best = min(peers, key=lambda side: work.spread(side.column("step_s"))[0])
        ratios = [theirs / ours for theirs, ours in zip(best.column("step_s"), sides[0].column("step_s"), strict=True)]
        result |= {"best_peer": best.name, "ratio": work.spread(ratios, 2), "target": case["target"]}
    if name == "smollm2":
        head = config["vocab_size"] * config["hidden_size"]  # its products are those of responses alone
        drawn = options.prompts * options.samples * options.response
        computed = (parameters - head) * (options.prompts * case["prompt_length"] + drawn) + head * drawn
        rate = product_rate(config["hidden_size"], config["intermediate_size"], options.threads)
        shares = [6 * computed / s / rate for s in sides[0].column("update_s")]
        result |= {"product_gflops": round(rate / 1e9), "update_share": work.spread(shares, 2)}
    return result


def product_rate(width: int, inner: int, threads: int) -> float:
    """Operations per second of products in bfloat16 of a layer's shape: the best of 20 rounds."""
    torch.set_num_threads(threads)
    rows, weight = torch.ones(2048, width, dtype=torch.bfloat16), torch.ones(inner, width, dtype=torch.bfloat16)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(4):
            torch.nn.functional.linear(rows, weight)
        seconds.append(time.perf_counter() - start)
    return 8 * 2048 * width * inner / min(seconds)


def table_row(name: str, found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    case = CASES[name]
    ours, theirs = found["verl"], found[found["best_peer"]]
    tokens = f"{options.response} tokens" if case["lengths"] == "fixed" else "long-tailed lengths (4 to 128 tokens)"
    kind = "bfloat16 products" if case.get("bf16") else "float32"
    aside = ""
    if "update_share" in found:
        kind += ", SmolLM2-135M"
        aside = (
            f"; the update at {round(100 * found['update_share'][0])}% of {found['product_gflops']} GFLOP/s of products"
        )
    if case.get("vllm"):
        kind += ", `rollout=vllm`"
        aside = f"; {found['times_verl_hf'][0]}x as fast as `rollout=hf`, "
        aside += f"{found['times_verl_ahead'][0]}x as fast as with `trainer.mode=async`"
    return [
        f"GRPO step, {options.prompts} prompts of {case['prompt_length']} tokens x {options.samples} responses, "
        f"{tokens}, {kind}",
        f"{ours['step_s'][0]} {ours['step_s'][1]} s, {ours['peak_mib']} MiB",
        f"{found['ratio'][0]}x {found['ratio'][1]} as fast as TRL ({theirs['step_s'][0]} s, {theirs['peak_mib']} MiB); "
        f"target: {case['target']}x{aside}",
    ]


def main() -> None:
    """Measure and print; or be one of the sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(PLAIN_CASES), help=f"of {', '.join(CASES)} (default: without vLLM)")
    parser.add_argument("--prompts", type=int, default=16, help="different prompts of a step (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (default 8)")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response of fixed length (default 64)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="its depth (default 4)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on each side (default 2)")
    parser.add_argument("--trl-micro", default="16", help="responses in a micro-batch of TRL (default 16)")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="of ours (default: of each case)")
    parser.add_argument("--budget-s", type=float, default=0, help="for all cases (default: 240 seconds for each)")
    parser.add_argument("--alone", action="store_true", help="measure our side only")
    parser.add_argument("--engine", default="hf", help=argparse.SUPPRESS)
    for hidden in ("--side", "--model", "--lengths"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--prompt-length", "--micro", "--end"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sides: dict[str, Callable[[argparse.Namespace, Turns], None]] = {"verl": verl_side, "trl": trl_side}
    if options.side:
        torch.set_num_threads(options.threads)
        work.END = options.end
        sides[options.side](options, Turns())
        return
    names = options.cases.split(",")
    settings = {
        key: value for key, value in vars(options).items() if key not in ("side", "model", "lengths", "micro", "engine")
    }
    progress = Progress("grpo_step", settings, options.budget_s or 240 * len(names))
    found: dict[str, Any] = {}
    for name in names:
        found[name] = measure(name, options, progress, len(names) - len(found))
        rows = [table_row(known, case, options) for known, case in found.items() if "ratio" in case]
        progress.publish(found, rows, is_complete=len(found) == len(names))


if __name__ == "__main__":
    main()
