"""Write the table of memory and traffic at scale between the marks in docs/results.md, from the cost model.

    python scripts/make_scaling_table.py                              the table of the document
    python scripts/make_scaling_table.py --model PATH --devices 16    likewise for a model's config.json, printed

`--check` exits 1 if the document is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.engines.sharding import DDP, FSDP, HSDP, TP, TPFSDP, Sharding  # noqa: E402
from verl.models.model_stats import ModelStats, model_stats  # noqa: E402

GIB = 2**30
DEVICES = (8, 64)
TOKENS = 16384  # of a micro-batch
MICRO_BATCHES = 8  # of an optimizer step, in each share of the rows
HEAD = (
    "| model | devices | `sharding=` | at rest | gathered meanwhile | activations | sent per optimizer step |\n"
    "|---|---|---|---|---|---|---|\n"
)


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


def table() -> str:
    """That of the document."""
    models = {"8B": of_shape(4096, 14336, 32, 32), "70B": of_shape(8192, 28672, 80, 64)}
    rows = [line for name, sizes in models.items() for line in lines(name, sizes, DEVICES)]
    return HEAD + "\n".join(rows) + "\n"


def between(text: str, mark: str, content: str) -> str:
    """`text` with `content` between <!-- mark --> and <!-- /mark -->."""
    start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, rest = text.split(start)
    return head + start + content + end + rest.split(end)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", help="a directory with a config.json, or a name on the hub")
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    args = parser.parse_args()
    if args.model:
        from transformers import AutoConfig

        sizes = model_stats(AutoConfig.from_pretrained(args.model))
        print(HEAD + "\n".join(lines(Path(args.model).name, sizes, args.devices)))
        return
    document = ROOT / "docs/results.md"
    old = document.read_text()
    new = between(old, "scale", table())
    if args.check and new != old:
        sys.exit("docs/results.md is not up to date: run scripts/make_scaling_table.py")
    document.write_text(new)


if __name__ == "__main__":
    main()
