"""Write the table of plans between the marks in docs/scaling.md: three models on 1, 8 and 64 GPUs.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    document = ROOT / "docs/scaling.md"
    old = document.read_text()
    with tempfile.TemporaryDirectory() as directory:
        new = between(old, "plan", HEAD + "\n".join(rows(Path(directory))) + "\n")
    if args.check and new != old:
        sys.exit("docs/scaling.md is not up to date: run scripts/make_plan_table.py")
    document.write_text(new)


if __name__ == "__main__":
    main()
