"""Who writes what: the tensors of several processes divided among them, the same arithmetic on each of them.

slices (optimizer)   every element by one of its holders: shards where they lie, copies divided among who has them
whole (a model)      every tensor by one process, which gathers it; files numbered through all processes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from verl.resharding.layout import Box, Layout, volume

FEWEST_CUT_SHARE = 4  # a copy that is more than this part of a fair share is cut among its holders


@dataclass(frozen=True)
class Share:
    """A slice that one process writes."""

    name: str
    rank: int
    box: Box


def shares(layout: Layout) -> list[Share]:
    """Every element of every tensor once, written by a process that holds it, as evenly as their bytes allow."""
    size, load = layout.mesh.size, [0] * layout.mesh.size
    fair = sum(prod(x.shape) * x.itemsize for x in layout.tensors.values()) / size
    found = []
    for name, tensor in sorted(layout.tensors.items()):  # an optimizer that was loaded has its state in another order
        holders: dict[Box, list[int]] = {}
        for rank in range(size):
            if (box := layout.holds(rank, name)) is not None:
                holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            is_large = len(ranks) > 1 and volume(box) * tensor.itemsize * FEWEST_CUT_SHARE > fair
            for part in _rows(box, len(ranks)) if is_large else [box]:
                rank = min(ranks, key=lambda holder: (load[holder], holder))
                ranks = [other for other in ranks if other != rank] if is_large else ranks
                load[rank] += volume(part) * tensor.itemsize
                found.append(Share(name, rank, part))
    return found


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Name -> the process that writes the whole tensor: the largest first, each to who has least."""
    load, found = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}


def model_files(
    sizes: Mapping[str, int], owner: Mapping[str, int], num_ranks: int, max_bytes: int
) -> tuple[list[dict[str, list[str]]], bytes | None]:
    """The files of a model that several processes write, as Hugging Face lays one out.

    Args:
        sizes: bytes of each tensor by its name in the files.
        owner: the process that writes it.
        max_bytes: of a file.
    Returns:
        Of each process, file -> names; and the index where there is more than one file.
    """
    cut = [list(_cut([name for name in sizes if owner[name] == rank], sizes, max_bytes)) for rank in range(num_ranks)]
    count = sum(len(files) for files in cut)
    if count <= 1:
        return [dict(zip(["model.safetensors"], files)) for files in cut], None
    numbers = iter(range(1, count + 1))
    named = [{f"model-{next(numbers):05d}-of-{count:05d}.safetensors": names for names in files} for files in cut]
    where = {name: file for files in named for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    return named, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _cut(names: Iterable[str], sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    now, filled = [], 0
    for name in names:
        if now and filled + sizes[name] > max_bytes:
            yield now
            now, filled = [], 0
        now.append(name)
        filled += sizes[name]
    if now:
        yield now


def _rows(box: Box, count: int) -> Sequence[Box]:
    """A box cut along its first axis into at most so many parts; whole where it has none to cut."""
    if not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    step = -(-(stop - start) // count)
    return [((first, min(first + step, stop)), *rest) for first in range(start, stop, step)]
