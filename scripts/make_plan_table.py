"""Write the tables of plans between the marks in docs/scaling.md: three models on 1, 8 and 64 GPUs, and long rows.

    python scripts/make_plan_table.py

`--check` exits 1 if the document is not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from make_scaling_table import between  # noqa: E402

from verl.compose.compose import compose_root  # noqa: E402
from verl.compose.validate import validate  # noqa: E402
from verl.trainer.plan.devices import device_named  # noqa: E402
from verl.trainer.plan.run_plan import RunPlan, plan_run  # noqa: E402

GIB = 2**30
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES = {  # of Qwen3 0.6B, Llama 3 8B and 70B
    "0.6B": (1024, 3072, 28, 16),
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": True}
RUN = [
    "algorithm=grpo", "critic=none", "actor=llama8b", "rollout=vllm", "rollout.kv_cache_gib=8",
    "++data.max_prompt_length=1024", "rollout.max_new_tokens=1024", "++trainer.prompts_per_step=128",
    "++trainer.group_size=8",
]  # fmt: skip
SHARDINGS = {
    1: [],
    8: ["sharding=fsdp", "++trainer.n_gpus_per_node=8"],
    64: [
        "sharding=tp_fsdp", "sharding.tensor_parallel=8", "rollout.tensor_parallel_size=8", "trainer=ray",
        "trainer.placement.address=auto", "++trainer.nnodes=8", "++trainer.n_gpus_per_node=8",
        "++trainer.prompts_per_step=128",
    ],
}  # fmt: skip
ROW = 32768  # tokens of a long row
EIGHT = ["++trainer.n_gpus_per_node=8", "rollout.max_new_tokens=31744", "++trainer.prompts_per_step=16"]
LONG = [  # model, GPUs, what the table calls it, micro-batch tokens of a process, further arguments
    ("8B", 8, "fsdp", ROW, ["sharding=fsdp", *EIGHT]),
    ("8B", 8, "dp_shard=4 cp=2", ROW // 2, ["sharding=parallel", "sharding.cp=2", *EIGHT]),
    ("8B", 8, "dp_shard=1 cp=8", ROW // 8, ["sharding=parallel", "sharding.cp=8", *EIGHT]),
]
LONG_HEAD = (
    "| model | GPUs | layout | tokens of a micro-batch | update, GiB | of it activations | seconds | most memory in |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
HEAD = (
    "| model | GPUs | sharding | most memory in | GiB | seconds of a step | mostly |\n|---|---|---|---|---|---|---|\n"
)


def row(name: str, count: int, plan: RunPlan) -> str:
    sharding = next((one.partition("=")[2] for one in SHARDINGS[count] if one.startswith("sharding=")), "none")
    peak, longest = plan.memory.peak, max(plan.stages, key=lambda stage: stage.seconds)
    size = f"{peak.total / GIB:.1f}" + ("" if plan.fits else ", does not fit")
    return f"| {name} | {count} | {sharding} | {peak.name} | {size} | {plan.step_s:.0f} | {longest.name} |"


def rows(directory: Path) -> Iterator[str]:
    for name, (hidden, mlp, layers, heads) in SHAPES.items():
        shape = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
        family = QWEN3 if name == "0.6B" else LLAMA
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps({**family, **shape, "num_attention_heads": heads}))
        for count, sharding in SHARDINGS.items():
            run = validate(compose_root("ppo", [*RUN, f"actor.model.path={directory / name}", *sharding]))
            yield row(name, count, plan_run(run, device_named("h100")))


def long_rows(directory: Path) -> Iterator[str]:
    for name, count, layout, tokens, more in LONG:
        engine = () if "rollout=hf" not in more else ("rollout=vllm", "rollout.kv_cache_gib=8")
        words = [word for word in (*RUN, *more) if word not in engine]
        words += [f"actor.model.path={directory / name}", f"actor.micro_batch_tokens={tokens}"]
        plan = plan_run(validate(compose_root("ppo", words)), device_named("h100"))
        update = next(phase for phase in plan.memory.phases if phase.name == "update actor")
        seconds = next(stage.seconds for stage in plan.stages if stage.name == "update actor")
        sizes = [f"{size / GIB:.1f}" for size in (update.total, update.parts.get("activations", 0))]
        peak = f"{plan.memory.peak.name}, {plan.memory.peak.total / GIB:.1f}" + ("" if plan.fits else ", does not fit")
        yield f"| {name} | {count} | {layout} | {tokens} | {' | '.join(sizes)} | {seconds:.0f} | {peak} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    document = ROOT / "docs/scaling.md"
    old = document.read_text()
    with tempfile.TemporaryDirectory() as directory:
        new = between(old, "plan", HEAD + "\n".join(rows(Path(directory))) + "\n")
        new = between(new, "long plan", LONG_HEAD + "\n".join(long_rows(Path(directory))) + "\n")
    if args.check and new != old:
        sys.exit("docs/scaling.md is not up to date: run scripts/make_plan_table.py")
    document.write_text(new)


if __name__ == "__main__":
    main()
