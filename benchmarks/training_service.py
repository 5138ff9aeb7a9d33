"""A GRPO step through the training service against the same step of `verl ppo` and of a session in Python.

    python benchmarks/training_service.py [--steps 12] [--hidden 256] [--layers 8]
    python benchmarks/training_service.py --products

8 prompts x 8 responses of 32 tokens (nothing ends them), a LoRA adapter of rank 16 on all layers but the head, one step
of the optimizer, a random Qwen2, float32. The service is a process of its own, driven by Tinker's SDK in this one: each
step saves a snapshot, samples by 8 requests, and trains. The three sides take turns, in rounds. Prints one JSON line:
seconds of a step, median and quartiles, and the ratio of the medians of each round. Then the samples of 4 adapters, 2
prompts x 2 responses each, one adapter after another against one batch of all.

With `--products` only what a training pass over the rows of 4 adapters could share: products of the layers of the base
model, forward and backward, over 4 groups of rows one after another against one product over all rows, and how many of
the products have other bits than alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _workload as work  # noqa: E402
import torch  # noqa: E402

PROMPTS, SAMPLES, TOKENS, RANK, WARM_UP = 8, 8, 32, 16, 2
LR = 1e-4


def prompts_of(tokenizer: Any) -> list[list[int]]:
    return [
        tokenizer(f"question {i}: what is {i} + {i * 3}?\n", add_special_tokens=False)["input_ids"]
        for i in range(PROMPTS)
    ]


def rows_of(prompts: list[list[int]], groups: Sequence[Sequence[tuple[Any, Any]]]) -> list[tuple[list[int], dict]]:
    """The data of a step: advantages are +1 and -1 by turns, which costs what a reward would leave."""
    rows = []
    for prompt, group in zip(prompts, groups, strict=True):
        zeros = [0.0] * (len(prompt) - 1)
        for index, (tokens, log_probs) in enumerate(group):
            share = (1.0 - 2.0 * (index % 2)) / len(tokens) / (PROMPTS * SAMPLES)
            inputs = {
                "target_tokens": [*prompt[1:], *tokens],
                "logprobs": [*zeros, *log_probs],
                "advantages": [*zeros, *[share] * len(tokens)],
            }
            rows.append(([*prompt, *tokens[:-1]], inputs))
    return rows


def session_steps(model: Path) -> Callable[[], None]:
    from verl import TrainingSession
    from verl.service.data import Datum

    session = TrainingSession(str(model), RANK, device="cpu", unembedding=False)
    prompts = prompts_of(session.tokenizer)

    def step() -> None:
        samples = session.sample(prompts, SAMPLES, max_new_tokens=TOKENS, stop=[])
        rows = rows_of(prompts, [[(x.tokens, x.log_probs) for x in group] for group in samples])
        session.forward_backward([Datum(*row) for row in rows], "ppo")
        session.optim_step(LR)

    return step


def service_steps(url: str, model: Path) -> Callable[[], None]:
    import tinker
    from tinker import types
    from transformers import AutoTokenizer

    service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    client = service.create_lora_training_client("bench", rank=RANK, train_unembed=False).result()
    prompts = prompts_of(AutoTokenizer.from_pretrained(model))

    def step() -> None:
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=TOKENS, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
        groups = [[(x.tokens, x.logprobs) for x in future.result().sequences] for future in futures]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens),
                loss_fn_inputs={name: types.TensorData.from_torch(torch.tensor(x)) for name, x in inputs.items()},
            )
            for tokens, inputs in rows_of(prompts, groups)
        ]
        client.forward_backward(data, "ppo")
        client.optim_step(types.AdamParams(learning_rate=LR)).result()

    return step


def ppo_seconds(model: Path, steps: int, directory: Path) -> list[float]:
    """Seconds of the steps of `verl ppo` with this work: generation, reward, update, sync."""
    from verl.models.pretrained import Pretrained

    rows = directory / "rows.jsonl"
    texts = [
        Pretrained(path=str(model)).load_tokenizer().decode(x)
        for x in prompts_of(Pretrained(path=str(model)).load_tokenizer())
    ]
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (directory / "rate.py").write_text(
        "def score(prompts, responses):\n    return [float(i % 2) for i in range(len(responses))]\n"
    )
    lora = f"actor.lora.rank={RANK}"
    words = [
        "algorithm=grpo", "algorithm.kl.coef=0", "critic=none", "reference=none", "checkpoint=off", "actor=pretrained",
        f"actor.model.path={model}", lora, f"actor.optimizer.lr={LR}", "data=files", f"data.train_files=[{rows}]",
        "reward=function", f"reward.path={directory}/rate.py:score", f"trainer.prompts_per_step={PROMPTS}",
        f"trainer.group_size={SAMPLES}", f"trainer.total_steps={steps}", "trainer.num_threads=1", "trainer.device=cpu",
        f"rollout.max_new_tokens={TOKENS}", f"rollout.min_new_tokens={TOKENS}", f"hydra.run.dir={directory}/run",
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "verl.cli", "ppo", *words], check=True, stdout=subprocess.DEVNULL, cwd=directory
    )
    lines = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    return [line["timing/step_s"] for line in lines if "timing/step_s" in line][WARM_UP:]


def mixing(model: Path, rounds: int) -> list[float]:
    """Seconds of the samples of 4 adapters one after another, over those in one batch; of each round."""
    from verl import TrainingSession
    from verl.service.sampling import PromptRequest, SamplingOptions, sample

    first = TrainingSession(str(model), RANK, device="cpu", unembedding=False)
    sessions = [first, *(first.another(RANK, seed=seed, unembedding=False) for seed in (1, 2, 3))]
    base, options = first.base, SamplingOptions(max_new_tokens=TOKENS, stop=())
    names, prompts = [x.name for x in sessions], prompts_of(first.tokenizer)[:2]

    def drawn(*chosen: str) -> None:
        requests = [PromptRequest(x, 2, (1,), name if len(chosen) > 1 else "") for name in chosen for x in prompts]
        with base.sampling_from(*chosen) as engine:
            sample(engine, base.tokenizer, requests, options, base.longest)

    found = []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        for name in names:
            drawn(name)
        middle = time.perf_counter()
        drawn(*names)
        if number:
            found.append((middle - begin) / (time.perf_counter() - middle))
    return found


def products(rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for hidden, tokens in ((h, n) for h in (256, 576) for n in (16, 64, 256, 1024)):
        shapes = (hidden, hidden), (hidden // 3, hidden), (3 * hidden, hidden), (hidden, 3 * hidden)
        weights = [torch.randn(*shape, generator=generator) for shape in shapes]
        ratios, others, count = [], 0, 0
        for number in range(rounds + 1):
            counts = [tokens - 3 * i for i in range(4)]  # of each adapter
            rows = [[torch.randn(sum(counts), x, generator=generator) for x in w.shape] for w in weights]
            begin = time.perf_counter()
            apart = [(g @ w, x @ w.T) for w, (gs, xs) in zip(weights, rows, strict=True)
                     for g, x in zip(gs.split(counts), xs.split(counts), strict=True)]  # fmt: skip
            middle = time.perf_counter()
            joint = [(g @ w, x @ w.T) for w, (g, x) in zip(weights, rows, strict=True)]
            if number:
                ratios.append((middle - begin) / (time.perf_counter() - middle))
            parts = [part for pair in joint for part in zip(*(x.split(counts) for x in pair), strict=True)]
            pairs = [(a, b) for one, other in zip(apart, parts, strict=True) for a, b in zip(one, other, strict=True)]
            others, count = others + sum(not torch.equal(a, b) for a, b in pairs), count + len(pairs)
        print(json.dumps({"benchmark": "training_service --products", "hidden": hidden, "tokens_of_each": tokens,
              "apart_by_joint": statistics.quantiles(ratios, n=4), "other_bits": others / count}))  # fmt: skip


def timed(step: Callable[[], None], count: int) -> list[float]:
    found = []
    for number in range(count):
        begin = time.perf_counter()
        step()
        if number >= WARM_UP:
            found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 12), ("rounds", 3), ("hidden", 256), ("layers", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--products", action="store_true")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    torch.set_num_threads(1)
    if options.products:
        products(10 * options.rounds)
        return
    with tempfile.TemporaryDirectory() as place:
        model, sides = Path(place, "model"), {"service": [], "session": [], "ppo": []}
        parameters = work.write_model(model, options.hidden, options.layers)
        words = ["serve-training", "actor=pretrained", f"actor.model.path={model}", "--port", "0", "--name", "bench"]
        words += ["trainer.device=cpu", "trainer.num_threads=1", "--dir", f"{place}/saved"]
        with subprocess.Popen([sys.executable, "-m", "verl.cli", *words], stdout=subprocess.PIPE, text=True) as serving:
            assert serving.stdout is not None
            url = next(line for line in serving.stdout if " at http" in line).split(" at ")[1].split(",")[0]
            try:
                through, alone = service_steps(url, model), session_steps(model)
                for number in range(options.rounds):
                    sides["service"].append(timed(through, options.steps))
                    sides["session"].append(timed(alone, options.steps))
                    directory = Path(place, f"ppo_{number}")
                    directory.mkdir()
                    sides["ppo"].append(ppo_seconds(model, options.steps, directory))
            finally:
                serving.kill()
        mixing_ratios = mixing(model, options.rounds)
    result: dict[str, Any] = {"benchmark": "training_service", "parameters": parameters, "steps": options.steps}
    for side, rounds in sides.items():
        times = [x for of_round in rounds for x in of_round]
        result[f"{side}_s"] = statistics.quantiles(times, n=4)
    for side in ("session", "ppo"):
        pairs = zip(sides["service"], sides[side], strict=True)
        result[f"service_by_{side}"] = [statistics.median(a) / statistics.median(b) for a, b in pairs]
    print(json.dumps(result | {"adapters_in_turns_by_one_batch": mixing_ratios}))


if __name__ == "__main__":
    main()
