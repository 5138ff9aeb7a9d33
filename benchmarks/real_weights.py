"""How far each execution path is from a plain forward pass of each row, on the weights of a real chat model.

    python benchmarks/real_weights.py --model DIRECTORY

The model, a Hugging Face directory, answers 200 chat prompts of ten kinds (`chats`), two responses each, half of them
in batches of one kind. What is compared, in nats a token:

    decoding     the log-probs of the tokens that were drawn, for each way of decoding
    scoring      those of the rows as packed, padded and right padded batches
    plain        two plain forward passes of a row alone, one of them with tokens behind it: the row's own rounding

Each batch is given to the check of the first batch and to that of decoding, as a run gives them its first one; a batch
that either calls wrong is a false alarm. `--save` writes all differences after each batch. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.losses import PPOClip
from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.errors import VerlError
from verl.model_paths.check import BOUNDS, TAIL, WINDOW, decoding_name, row_gaps
from verl.models.parallel_info import Autocast
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.rows import left_padded
from verl.workers.actor import Actor
from verl.workers.first_batch_check import FirstBatchCheck, with_tail

KINDS = 10
BATCH = 10  # prompts
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Lines = list[tuple[Tensor, Tensor]]  # of batches: differences and mask, [B T]


def chats(count: int, special: list[str]) -> list[list[dict[str, str]]]:
    """Chats, the n-th of kind n modulo `KINDS`; the same on every machine."""
    drawn = random.Random(0)
    nouns = ("river", "engine", "violin", "contract", "planet", "recipe", "bridge", "neuron")
    return [_chat(number % KINDS, drawn, drawn.choice(nouns), special) for number in range(count)]


def _chat(kind: int, drawn: random.Random, noun: str, special: list[str]) -> list[dict[str, str]]:
    number, user = drawn.randint(2, 999), ""
    system = "You answer in one short sentence."
    if kind == 0:
        user = drawn.choice((f"What is a {noun}?", f"Tell me about the {noun}.", "hi", f"{number}+{number}="))
    elif kind == 1:
        system = f"You are an expert on every {noun}. Answer as JSON with the keys {noun} and year. Never apologise."
        user = f"Which {noun} was the most important of {1000 + number}?"
    elif kind == 2:
        user = f"def {noun}(x):\n    for i in range({number}):\n        x += i ** 2\n    return x\n# What is it?"
    elif kind == 3:
        user = drawn.choice(
            ("请用一句话解释什么是机器学习。", "长江有多长?", "把这句话翻译成英文:今天天气很好。")
        ) + str(number)
    elif kind == 4:
        user = "".join(drawn.choices("😀🚀🐍🎻🌍👩‍👩‍👧‍👦🇨🇳✅", k=12)) + " ?"
    elif kind == 5:
        user = drawn.choice((f"{noun} ", "la ", f"{number}, ", "= ", "\n", "aaaa")) * drawn.choice((40, 80, 160))
    elif kind == 6:
        user = f"Ignore {drawn.choice(special)} and {drawn.choice(special)}{drawn.choice(special)} in this: {noun}"
    elif kind == 7:
        user = "".join(drawn.choices(special, k=drawn.choice((1, 2, 5, 20))))
        system = drawn.choice(("", user))
    elif kind == 8:
        user = (
            f"| {noun} | year |\n|---|---|\n| a | {number} |\nhttps://a.org/?q={number}&x=%20 \\frac{{1}}{{{number}}}"
        )
    turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if kind == 9:
        reply = {"role": "assistant", "content": f"A {noun} costs {number}."}
        turns[1:] = [
            {"role": "user", "content": f"What does a {noun} cost?"},
            reply,
            {"role": "user", "content": "Why?"},
        ]
    return turns


def batches(tokenizer: Any, count: int) -> list[DataProto]:
    """Prompts, `BATCH` each: the first half sorted by kind. One prompt in ten is special tokens without a template."""
    special = [tokenizer.decode([i]) for i in tokenizer.all_special_ids]
    special += [
        text for text in ("<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_code>") if text not in special
    ]
    lines = [tokenizer.apply_chat_template(x, add_generation_prompt=True)["input_ids"] for x in chats(count, special)]
    for number in range(7, count, KINDS):  # special tokens alone
        if number % 4 != 3:
            lines[number] = tokenizer("".join(special[: 1 + number % len(special)]) * (1 + number % 3))["input_ids"]
    half = count // 2
    order = sorted(range(half), key=lambda n: (n % KINDS, n)) + list(range(half, count))
    made = []
    for at in range(0, count, BATCH):
        numbers = torch.tensor(order[at : at + BATCH])
        tokens, mask = left_padded([lines[n] for n in numbers.tolist()], tokenizer.pad_token_id)
        fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers}
        made.append(DataProto.from_dict(fields))
    return made


class Measured:
    """An actor with the model in one type, and the differences of its paths."""

    def __init__(self, model: str, dtype: str, tokens: int):
        source = Pretrained(path=model)
        context = BuildContext(tokenizer=source.load_tokenizer())
        algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip())
        rollout = HFRollout(max_new_tokens=tokens, temperature=1.0)
        autocast: Autocast = "bfloat16" if dtype == "bfloat16" else None
        actor = Actor(model=source, optimizer=AdamW(lr=1e-5), autocast=autocast)
        self.worker: Any = actor.start(context, Parallelism(), algorithm, rollout, total_updates=1)
        self.gaps: dict[str, Lines] = {}
        self.alarms: list[str] = []

    def add(self, number: int, prompts: DataProto) -> None:
        """Draw the responses of a batch, and note all differences."""
        worker, engine, sampler = self.worker, self.worker.engine, self.worker.generator.engine
        sampler._wrong.clear()
        sampler.longest_compared = 10**6
        rows = worker.generate(prompts, GenerationRequest(number, 2))
        mask = rows["response_mask"]
        check = FirstBatchCheck.of_tokens("actor.model", engine, worker.head)
        plain = engine.infer(rows, check.plain, alone=True)["log_probs"]
        longer = engine.infer(rows, with_tail(check.plain, engine, rows), alone=True)["log_probs"]
        self._note(f"the row alone with {TAIL} tokens behind it", longer, plain, mask)
        self._note(decoding_name(sampler.paths(1)), rows["rollout_log_probs"], plain, mask)
        for scoring in ("packed", "padded", "right_padded"):
            engine._limit = None if scoring == "packed" else scoring
            self._note(scoring.replace("_", " "), engine.infer(rows, check.compute)["log_probs"], plain, mask)
        engine._limit = None
        sampler._wrong.add(decoding_name(sampler.paths(1)))
        again = worker.generate(prompts, GenerationRequest(number, 2))
        name = decoding_name(sampler.paths(1))
        if again["responses"].equal(rows["responses"]):
            self._note(name, again["rollout_log_probs"], plain, mask)
        else:
            self._note(
                name,
                again["rollout_log_probs"],
                engine.infer(again, check.plain, alone=True)["log_probs"],
                again["response_mask"],
            )
        sampler._wrong.clear()
        self._checks(number, rows)

    def _checks(self, number: int, rows: DataProto) -> None:
        worker, sampler = self.worker, self.worker.generator.engine
        check = FirstBatchCheck.of_tokens("actor.model", worker.engine, worker.head)
        try:
            check.check(rows)
            if worker.engine._limit is not None:
                self.alarms.append(f"batch {number}: not {worker.engine._limit}")
        except VerlError as error:
            self.alarms.append(f"batch {number}: {error}")
        worker.engine._limit = None
        if (gap := sampler.decoding_gap(rows)) > sampler.gap_bound:
            self.alarms.append(f"batch {number}: decoding {gap:.3g}")

    def _note(self, name: str, found: Tensor, plain: Tensor, mask: Tensor) -> None:
        self.gaps.setdefault(name, []).append(((found - plain).abs().double().masked_fill(~mask, 0.0), mask))

    def found(self) -> dict[str, Any]:
        """By path: mean and worst token, worst row by all of its tokens and as the checks count it, in nats."""
        paths = {}
        for name, lines in self.gaps.items():
            tokens = torch.cat([gap[mask] for gap, mask in lines])
            rows = [row_gaps(gap, torch.zeros_like(gap), mask, least) for gap, mask in lines for least in (1, WINDOW)]
            plain, counted = torch.cat(rows[::2]), torch.cat(rows[1::2])
            paths[name] = {
                "mean": float(tokens.mean()), "worst_token": float(tokens.max()), "worst_row": float(plain.max()),
                "worst_counted": float(counted.max()), "tokens": len(tokens), "rows": len(plain),
            }  # fmt: skip
        return paths


def rows_of(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Lines of the table in docs/results.md: one for each dtype."""
    lines = []
    for dtype, case in found.items():
        paths = case["paths"]
        figures = "; ".join(f"{path}: {gap['mean']:.2g}, {gap['worst_row']:.2g}" for path, gap in paths.items())
        counted = max(gap["worst_counted"] for gap in paths.values())
        rows = max(gap["rows"] for gap in paths.values())
        lines.append([
            f"real weights, {dtype}: nats of a token from the row alone, mean and worst mean of a row",
            figures,
            f"a check counts at most {counted:.2g} and allows {BOUNDS[DTYPES[dtype]]:g}; {rows} rows each",
        ])  # fmt: skip
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory of a chat model")
    parser.add_argument("--prompts", type=int, default=200, help="(default 200)")
    parser.add_argument("--tokens", type=int, default=12, help="of a response, at most (default 12)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="(default bfloat16 float32)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--save", help="file for all differences")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found, raw = {}, {}
    for dtype in options.dtypes:
        measured = Measured(options.model, dtype, options.tokens)
        for number, prompts in enumerate(batches(measured.worker.tokenizer, options.prompts)):
            measured.add(number, prompts)
            raw[dtype] = measured.gaps
            if options.save:
                torch.save(raw, options.save)
            print(f"{dtype}: batch {number}, {len(measured.alarms)} alarms", file=sys.stderr, flush=True)
        found[dtype] = {"paths": measured.found(), "alarms": measured.alarms}
    print(json.dumps({"benchmark": "real_weights", **vars(options), "found": found, "rows": rows_of(found)}))


if __name__ == "__main__":
    main()
