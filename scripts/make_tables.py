"""Print tables that are made from the code; `make docs` adds the first four to the site.

python scripts/make_tables.py fields      fields of a batch, shape letters and terms
python scripts/make_tables.py models      families of models and their execution paths
python scripts/make_tables.py scaling     memory and traffic of shardings, from the cost model: of 8B and 70B models
python scripts/make_tables.py scaling --model PATH --devices 16       likewise for a model's config.json
python scripts/make_tables.py plans       plans of models of 0.6B to 70B and a mixture on 1, 8 and 64 GPUs
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from verl.compose.compose import compose_root  # noqa: E402
from verl.compose.validate import validate  # noqa: E402
from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, Sharding  # noqa: E402
from verl.model_paths.families import family_table, summaries  # noqa: E402
from verl.models.model_stats import ModelStats, model_stats  # noqa: E402
from verl.protocol.fields import DIMS, FIELDS, Field  # noqa: E402
from verl.trainer.plan.run_plan import RunPlan, plan_run  # noqa: E402
from verl.trainer.plan.workload import device_named  # noqa: E402

GIB = 2**30
MODELS_HEAD = "| family | | rows are scored | tokens are drawn | notes |\n|---|---|---|---|---|\n"

LETTERS = {**DIMS, "V": "vocabulary", "D": "hidden size of the model"}

TERMS = {
    "actor": "the policy: one set of weights that both trains and generates",
    "batch": "the rows of one training step: prompts per step times group size",
    "critic": "a backbone with a value head that estimates the reward still to come",
    "description": "a frozen dataclass made by `@component`, named by `_target_`, that says what a component is; "
    "`build(context)` makes it",
    "driver": "the process that runs the algorithm as straight-line code and calls the roles",
    "field": "a named tensor of a batch, with a contract in the table above",
    "group": "the responses to one prompt within one step",
    "mini-batch": "the rows that one optimizer step uses",
    "micro-batch": "the rows that go through the model at once; its size changes nothing but memory and rounding",
    "off the mask": "where `response_mask` is False: padding, and tokens that the policy did not choose",
    "producer": "the function that made a field, named in errors by its file and line",
    "reference": "the frozen policy that the KL penalty measures the distance to",
    "role": "an actor, critic, reference or reward behind one interface, in this process or another",
    "rollout": "sampling responses to prompts, with their log-probabilities",
    "score": "what the reward function gave; the reward is the score less the KL penalty",
    "step": "one round of generation, scoring, credit and updates",
    "strict check": "checks of content, not of shapes alone; on with `VERL_STRICT_DATA_CHECK=1`",
}

DEVICES = (8, 64)
MICRO_BATCHES = 8  # of an optimizer step, in each share of the rows
SCALING_HEAD = (
    "| model | devices | `sharding=` | at rest | gathered meanwhile | activations | sent per optimizer step |\n"
    "|---|---|---|---|---|---|---|\n"
)

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
PLAN_HEAD = (
    "| model | GPUs | sharding | most memory in | GiB | seconds of a step | mostly |\n|---|---|---|---|---|---|---|\n"
)

SCALING_TEXT = """# Memory and traffic of shardings

GiB in each process of one trained role: float32 weights with AdamW under `autocast=bfloat16`, gradient checkpointing,
micro-batches of 16384 tokens, 8 of them per optimizer step, 8 devices to a machine (`tp` within one). Computed, not
measured.

"""
PLANS_TEXT = """# Plans of large models

By calculation (`verl plan`); none of these was run. GRPO with 128 prompts of 1024 tokens, 8 responses of 1024 tokens
each, `actor=llama8b` (float32 weights, AdamW, `autocast=bfloat16`, gradient checkpointing), `rollout=vllm` with 8
GiB of keys and values, on H100s with 80 GB:

"""
LAYOUT_TEXTS = {
    "layouts": """
## Layouts

The update of the actor in that run, by `sharding=parallel` with these sizes and `rollout=hf`. *Sent* is per process and
optimizer step; seconds assume that everything is sent between machines: an upper bound.

""",
    "long plan": """
## Long rows

The same with rows of 32,768 tokens, and 16 prompts for each 8 GPUs:

""",
    "experts": """
## Experts

A mixture of the shape of Qwen3-30B-A3B, with 128 experts of which a token has 8, where routing is balanced:

""",
}


def fields() -> str:
    """Fields of a batch, shape letters and terms, from `verl/protocol/fields.py`."""
    letters = [f"| **{letter}** | {meaning} |" for letter, meaning in LETTERS.items()]
    terms = [f"| {term} | {meaning} |" for term, meaning in sorted(TERMS.items())]
    return "\n".join(
        [
            "# Fields of a batch",
            "",
            "## Shape letters",
            "",
            "Index `[b, t]` of a response tensor always belongs to response token t.",
            "",
            "| letter | meaning |",
            "|---|---|",
            *letters,
            "",
            "## Fields",
            "",
            "Names of your own are free; `verl.protocol.fields.register(Field(...))` has them checked and re-padded "
            "too.",
            "`padding` fills the places added when batches of other lengths are joined.",
            "",
            "| field | shape | dtype | unit | padding | meaning | made by |",
            "|---|---|---|---|---|---|---|",
            *map(_row, FIELDS.values()),
            "",
            "## Terms",
            "",
            "| term | meaning |",
            "|---|---|",
            *terms,
            "",
        ]
    )


def _row(field: Field) -> str:
    pad = "pad token" if field.pad == "pad_token" else field.pad
    cells = [f"`{field.name}`", f"`{field.shape}`", field.dtype, field.unit, str(pad), field.meaning, field.producer]
    return f"| {' | '.join(cells)} |"


def models() -> str:
    """Families of models and their execution paths, from `verl/model_paths/families.json`."""
    versions = " and ".join(f"{name} {version}" for name, version in family_table().versions.items())
    rows = summaries()
    lines = ["| " + " | ".join((x.name, x.status, x.scoring, x.decoding, x.note)) + " |\n" for x in rows]
    counts = Counter(row.status.partition(" up to")[0] for row in rows)
    words = ", ".join(f"{counts[status]} {status}" for status in ("fast", "plain", "refused", "not built"))
    return f"# Families of models\n\nWith {versions}:\n\n{MODELS_HEAD}{''.join(lines)}\n{len(rows)} records: {words}.\n"


def of_shape(hidden: int, mlp: int, layers: int, heads: int) -> ModelStats:
    """A model of the Llama 3 family."""
    from transformers import LlamaConfig

    shape: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    config = LlamaConfig(
        vocab_size=128_256, num_attention_heads=heads, num_key_value_heads=8, tie_word_embeddings=False, **shape
    )
    return model_stats(config)


def shardings(world_size: int, per_machine: int = 8) -> dict[str, Sharding]:
    """Shardings that are possible on so many devices, by name."""
    together = min(per_machine, world_size)
    grad_op = FSDP(strategy="SHARD_GRAD_OP")
    by_name: dict[str, Sharding] = {"ddp": DDP(), "fsdp": FSDP(), "fsdp, SHARD_GRAD_OP": grad_op}
    if world_size > per_machine:
        by_name["hsdp"] = HSDP(replicas=world_size // per_machine)
    by_name["tp"] = TP(tensor_parallel=together)
    if world_size > together:
        by_name["tp_fsdp"] = TPFSDP(tensor_parallel=together)
    return by_name


def lines(name: str, sizes: ModelStats, devices: Sequence[int]) -> Iterator[str]:
    """A line for each number of devices and each sharding."""
    activations = sizes.activation_elements(TOKENS, recomputed=True) * 2
    for count in devices:
        for option, sharding in shardings(count).items():
            cost = sharding.cost(count, sizes, TOKENS, weight_bytes=4, compute_bytes=2)
            cells = (cost.persistent_bytes, cost.gathered, activations, cost.per_step(MICRO_BATCHES))
            yield f"| {name} | {count} | {option} | " + " | ".join(f"{x / GIB:.1f}" for x in cells) + " |"


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


def scaling(model: str | None = None, devices: Sequence[int] = DEVICES) -> str:
    """Memory and traffic of one trained role under each sharding, by `Sharding.cost`."""
    if model is None:
        of = {"8B": of_shape(4096, 14336, 32, 32), "70B": of_shape(8192, 28672, 80, 64)}
    else:
        from transformers import AutoConfig

        of = {Path(model).name: model_stats(AutoConfig.from_pretrained(model))}
    table = [line for name, sizes in of.items() for line in lines(name, sizes, devices)]
    return SCALING_TEXT + SCALING_HEAD + "\n".join(table) + "\n"


def plans() -> str:
    """Plans of whole runs, and of the update of the actor under several layouts."""
    with tempfile.TemporaryDirectory() as directory:
        text = PLANS_TEXT + PLAN_HEAD + "\n".join(rows(Path(directory))) + "\n"
        for table in dict.fromkeys(case[0] for case in LAYOUTS):
            text += LAYOUT_TEXTS[table] + LAYOUT_HEAD + "\n".join(layout_rows(Path(directory), table)) + "\n"
    return text


TABLES: dict[str, Callable[[], str]] = {"fields": fields, "models": models, "scaling": scaling, "plans": plans}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", help="of scaling: a directory with a config.json, or a name on the hub")
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES), help="of scaling")
    args = parser.parse_args()
    print(scaling(args.model, args.devices) if args.table == "scaling" else TABLES[args.table]())


if __name__ == "__main__":
    main()
