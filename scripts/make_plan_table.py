"""Write the tables of plans between the marks in docs/results.md: models on 1, 8 and 64 GPUs, layouts, long rows
and experts.

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
from verl.trainer.plan.run_plan import RunPlan, plan_run  # noqa: E402
from verl.trainer.plan.workload import device_named  # noqa: E402

GIB = 2**30
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
SHAPES = {  # of Qwen3 0.6B, Llama 3 8B and 70B
    "0.6B": (1024, 3072, 28, 16),
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
}
MIXTURE = {  # of Qwen3 30B-A3B
    **LLAMA, "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
TOKENS = 16384  # of a micro-batch
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
ON_HOSTS = ["trainer=ray", "trainer.placement.address=auto", "++trainer.nnodes=8", "++trainer.n_gpus_per_node=8"]
PLACES = {8: ["++trainer.n_gpus_per_node=8"], 64: ON_HOSTS}
SHORT_ROW, LONG_ROW = 2048, 32768  # tokens, 1,024 of them the prompt
# Table, model, GPUs, tokens of a row, and sizes of `sharding=parallel`
LAYOUTS = [
    ("layouts", "8B", 8, SHORT_ROW, "dp_shard=8"),
    ("layouts", "8B", 8, SHORT_ROW, "dp_shard=4 tp=2"),
    ("layouts", "8B", 8, SHORT_ROW, "pp=2 dp_shard=4"),
    ("layouts", "8B", 8, SHORT_ROW, "pp=2 dp_replicate=2 tp=2"),
    ("layouts", "8B", 8, SHORT_ROW, "pp=4 dp_shard=2"),
    ("layouts", "70B", 64, SHORT_ROW, "dp_shard=64"),
    ("layouts", "70B", 64, SHORT_ROW, "dp_shard=8 tp=8"),
    ("layouts", "70B", 64, SHORT_ROW, "pp=4 dp_shard=16"),
    ("layouts", "70B", 64, SHORT_ROW, "pp=8 dp_shard=8"),
    ("layouts", "70B", 64, SHORT_ROW, "pp=8 dp_replicate=1 tp=8"),
    ("long plan", "8B", 8, LONG_ROW, "dp_shard=8"),
    ("long plan", "8B", 8, LONG_ROW, "dp_shard=4 cp=2"),
    ("long plan", "8B", 8, LONG_ROW, "dp_shard=1 cp=8"),
    ("long plan", "8B", 8, LONG_ROW, "dp_shard=2 cp=4 cp_style=ulysses"),
    ("long plan", "8B", 8, LONG_ROW, "pp=2 dp_shard=1 cp=4"),
    ("long plan", "70B", 64, LONG_ROW, "dp_shard=64"),
    ("long plan", "70B", 64, LONG_ROW, "dp_shard=8 cp=8"),
    ("long plan", "70B", 64, LONG_ROW, "dp_shard=2 cp=4 tp=8"),
    ("long plan", "70B", 64, LONG_ROW, "pp=4 dp_shard=2 cp=8"),
    ("experts", "30B-A3B", 8, SHORT_ROW, "dp_shard=8"),
    ("experts", "30B-A3B", 8, SHORT_ROW, "dp_shard=8 ep=2"),
    ("experts", "30B-A3B", 8, SHORT_ROW, "dp_shard=8 ep=8"),
    ("experts", "30B-A3B", 64, SHORT_ROW, "dp_shard=64"),
    ("experts", "30B-A3B", 64, SHORT_ROW, "dp_shard=64 ep=8"),
    ("experts", "30B-A3B", 64, LONG_ROW, "dp_shard=8 cp=8 ep=8"),
]
LAYOUT_HEAD = (
    "| model | GPUs | layout | tokens of a row | of a micro-batch | at rest, GiB | activations | update | sent, GiB | "
    "update, s |\n|---|---|---|---|---|---|---|---|---|---|\n"
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
    (directory / "30B-A3B").mkdir()
    (directory / "30B-A3B" / "config.json").write_text(json.dumps(MIXTURE))
    for name, (hidden, mlp, layers, heads) in SHAPES.items():
        shape = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
        family = QWEN3 if name == "0.6B" else LLAMA
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps({**family, **shape, "num_attention_heads": heads}))
        for count, sharding in SHARDINGS.items():
            run = validate(compose_root("ppo", [*RUN, f"actor.model.path={directory / name}", *sharding]))
            yield row(name, count, plan_run(run, device_named("h100")))


def layout_rows(directory: Path, table: str) -> Iterator[str]:
    """Of the update of the actor, in one of the processes."""
    for _, name, count, length, layout in (case for case in LAYOUTS if case[0] == table):
        degrees = dict(pair.split("=") for pair in layout.split())
        tokens = max(TOKENS, length) // int(degrees.get("cp", 1))
        prompts = 128 if length == SHORT_ROW else 16 * count // 8
        words = [word for word in RUN if not word.startswith(("rollout", "++trainer.prompts"))]
        words += [f"rollout.max_new_tokens={length - 1024}", f"++trainer.prompts_per_step={prompts}", *PLACES[count]]
        words += ["sharding=parallel", *(f"sharding.{degree}={size}" for degree, size in degrees.items())]
        words += [f"actor.model.path={directory / name}", f"actor.micro_batch_tokens={tokens}"]
        plan = plan_run(validate(compose_root("ppo", words)), device_named("h100"))
        role = plan.memory.roles[0]
        update = next(phase for phase in plan.memory.phases if phase.name == "update actor")
        stage = next(stage for stage in plan.stages if stage.name == "update actor")
        rest = role.weights + role.gradients + role.optimizer
        sizes = [rest, update.parts["activations"], update.total, stage.sent_bytes]
        cells = [f"{size / GIB:.1f}" for size in sizes]
        cells[2] += "" if update.total <= plan.memory.limit else ", does not fit"
        yield f"| {name} | {count} | {layout} | {length} | {role.tokens} | {' | '.join(cells)} | {stage.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    document = ROOT / "docs/results.md"
    old = document.read_text()
    with tempfile.TemporaryDirectory() as directory:
        new = between(old, "plan", HEAD + "\n".join(rows(Path(directory))) + "\n")
        for table in dict.fromkeys(case[0] for case in LAYOUTS):
            new = between(new, table, LAYOUT_HEAD + "\n".join(layout_rows(Path(directory), table)) + "\n")
    if args.check and new != old:
        sys.exit("docs/results.md is not up to date: run scripts/make_plan_table.py")
    document.write_text(new)


if __name__ == "__main__":
    main()
