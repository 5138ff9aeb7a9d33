"""One of several processes of a HybridActor, as a user's own script would be: trains, samples, saves, and tells."""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from verl.cluster.placement import check_process_groups
from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor

STEPS, ROWS = 3, 4  # rows of all groups together


def batches(actor):
    """Of each step, two halves, each with rows for all groups: prompts of different lengths."""
    texts = ["1+2=", "34+5=", "what is 6*7? ", "9-", "77+1=", "a", "0*0*0*0=", "12+"]
    encoded = actor.tokenizer(texts, padding=True, return_tensors="pt")
    for step in range(STEPS):
        order = torch.arange(2 * ROWS).roll(step)
        yield [{name: x[rows] for name, x in encoded.items()} for rows in order.split(ROWS)]


def course(path: str, config: dict, lora: dict | None, directory: Path, *, loaded: bool = False) -> dict:
    """Steps of a loop in which gradients wait for a second half of the batch, with text drawn in between."""
    if loaded:
        source = HybridActor.from_pretrained(path, dtype="float64", device="cpu")
        torch.manual_seed(3)
        actor = HybridActor(source.model, source.tokenizer, hybrid_config=config, lora=lora)
    else:
        torch.manual_seed(3)
        actor = HybridActor.from_pretrained(path, hybrid_config=config, lora=lora, dtype="float64", device="cpu")
    groups = 1 if actor.process_group is None else torch.distributed.get_world_size() // config.get("tp_size", 1)
    group = 0 if actor.process_group is None else torch.distributed.get_rank() // config.get("tp_size", 1)
    optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad], lr=1e-2)
    found: dict = {"losses": [], "norms": [], "texts": []}
    for step, halves in enumerate(batches(actor)):
        for half in halves:
            own = {name: x.chunk(groups)[group] for name, x in half.items()}
            labels = own["input_ids"].masked_fill(own["attention_mask"] == 0, -100)[:, 1:]
            logits = actor(**own).logits[:, :-1]  # transformers' own loss is computed in float32
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * groups).backward()  # gradients are those of the mean over groups
            found["losses"].append(loss.item())
            drawn = actor.generate(**own, do_sample=True, top_k=0, max_new_tokens=5, seed=step)
            found["texts"].append(actor.tokenizer.batch_decode(drawn, skip_special_tokens=True))
        found["norms"].append(float(actor.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    found["greedy"] = actor.generate(**halves[0], max_new_tokens=6).tolist()
    actor.save_pretrained(directory)
    return found | {"group": group, "groups": groups, "processes": str(check_process_groups(actor=actor))}


def main() -> None:
    path, config, lora, directory, loaded = sys.argv[1:6]
    settings = json.loads(config)
    found = course(path, settings, json.loads(lora), Path(directory), loaded=loaded == "loaded")
    if settings.get("tp_size", 1) > 1:
        found |= refused(path, settings) | begun_apart(path, settings)
    Path(directory).with_name(f"found_{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def refused(path: str, config: dict) -> dict:
    """What siblings are told who were given different rows, or replace a model that is divided."""
    actor = HybridActor.from_pretrained(path, hybrid_config=config, dtype="float64", device="cpu")
    ids = torch.full((1, 4), 5 + torch.distributed.get_rank())
    found = {"refused": told(actor, input_ids=ids)}
    actor.model.register_parameter("added", torch.nn.Parameter(torch.zeros(1)))
    found["changed"] = told(actor.generate, torch.full((1, 4), 5))
    found["replaced"] = told(setattr, actor, "model", HybridActor.from_pretrained(path, device="cpu").model)
    return found


def told(call, *args, **options) -> str:
    try:
        call(*args, **options)
    except ConfigError as error:
        return str(error)
    return ""


def begun_apart(path: str, config: dict) -> dict:
    """What becomes of an adapter that each process draws by a seed of its own, and of a model that differs in each."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    actor = HybridActor.from_pretrained(path, hybrid_config=config, lora={"rank": 2}, device="cpu")
    first = {name: x for name, x in actor.named_parameters() if "lora_A" in name}
    sums = [float((x.full_tensor() if hasattr(x, "full_tensor") else x).abs().sum()) for x in first.values()]
    own = torch.rand(())
    model = HybridActor.from_pretrained(path, device="cpu").model
    model.lm_head.weight.data[rank] += 1
    head = HybridActor(model, hybrid_config=config).model.lm_head.weight
    return {"adapter": sums, "drew": float(own), "heads": float(head.full_tensor().abs().sum())}


if __name__ == "__main__":
    main()
