"""The plan from one layout to another: what has to move, computed once, before anything moves.

training layout ──┐
                  ├── plan: (tensor, slice, from rank, to rank) ... ── carried out by `verl.resharding.execute`
generation layout ┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from math import prod

from verl.resharding.layout import Box, Layout, Mesh, TensorLayout, difference, intersection, volume


@dataclass(frozen=True)
class Move:
    """A slice that travels, in coordinates of the whole tensor."""

    name: str
    box: Box
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """What has to move so that every rank holds what `target` says, given what it holds by `source`.

    Each missing element comes from exactly one rank, so that the volume is the least possible: `lower_bound`.
    """

    source: Layout
    target: Layout
    moves: tuple[Move, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """That travel between ranks."""
        return sum(move.num_bytes for move in self.moves)

    @cached_property
    def received(self) -> Counter[int]:
        """Rank -> bytes that arrive there."""
        return _summed((move.target, move.num_bytes) for move in self.moves)

    @cached_property
    def sent(self) -> Counter[int]:
        """Rank -> bytes that leave it."""
        return _summed((move.source, move.num_bytes) for move in self.moves)

    def rounds(self, limit_bytes: int) -> Iterator[list[Move]]:
        """The moves, cut so that in each round no rank sends or receives more than `limit_bytes`.

        Whole tensors stay together as far as they fit: a target that takes tensors one by one gets them so.

        Raises:
            ValueError: one row of a slice is larger than the limit.
        """
        now, sent, received = [], Counter(), Counter()
        for move in self.moves:
            for part in _cut(move, limit_bytes):
                full = max(sent[part.source], received[part.target]) + part.num_bytes > limit_bytes
                if full and now:
                    yield now
                    now, sent, received = [], Counter(), Counter()
                now.append(part)
                sent[part.source] += part.num_bytes
                received[part.target] += part.num_bytes
        if now:
            yield now


def reshard_plan(source: Layout, target: Layout) -> Plan:
    """What has to move from one layout to another over the same ranks.

    Raises:
        ValueError: the layouts do not describe the same tensors and ranks, or nobody holds what is wanted.
    """
    _refuse_unequal(source, target)
    load: Counter[int] = Counter()
    moves = []
    for name, wanted in target.tensors.items():
        holders: dict[Box, list[int]] = {}
        for rank in range(source.mesh.size):
            if (box := source.holds(rank, name)) is not None:
                holders.setdefault(box, []).append(rank)
        for rank in range(target.mesh.size):
            moves += _fetches(
                name, wanted.box(target.mesh, rank), source.holds(rank, name), holders, rank, load, wanted
            )
    return Plan(source, target, tuple(moves))


def lower_bound(source: Layout, target: Layout) -> int:
    """The bytes that must travel at least: what each rank wants and does not hold."""
    total = 0
    for name, wanted in target.tensors.items():
        for rank in range(target.mesh.size):
            box, own = wanted.box(target.mesh, rank), source.holds(rank, name)
            if box is not None:
                shared = None if own is None else intersection(box, own)
                total += (volume(box) - (0 if shared is None else volume(shared))) * wanted.itemsize
    return total


def gathering_volume(source: Layout) -> int:
    """The bytes that travel if every rank gathers every tensor whole, the way without a plan."""
    whole = sum(prod(tensor.shape) * tensor.itemsize for tensor in source.tensors.values())
    return sum(whole - source.num_bytes(rank) for rank in range(source.mesh.size))


def aligned(source: Layout, target: Layout) -> Layout:
    """`target` with its ranks arranged so that as little as possible travels.

    Training TP4 x DP2 and generation TP2 x DP4: with the usual order of ranks a device's quarter often lies outside of
    the half that it is to hold; arranged anew it always lies within. Tried are all orders of the prime factors of the
    mesh's dimensions.
    """
    best, least = target, _cost(source, target)
    factors = [(index, prime) for index, (_, size) in enumerate(target.mesh.dims) for prime in _primes(size)]
    for order in _distinct_orders(factors):
        tried = Layout(Mesh(target.mesh.dims, _ranks(factors, order)), target.tensors)
        if (cost := _cost(source, tried)) < least:
            best, least = tried, cost
    return best


def _fetches(
    name: str,
    wanted: Box | None,
    own: Box | None,
    holders: Mapping[Box, Sequence[int]],
    rank: int,
    load: Counter[int],
    tensor: TensorLayout,
) -> Iterator[Move]:
    """What a rank has to be sent of one tensor: from the holder that has sent least, the nearest of several."""
    missing = [] if wanted is None else [wanted] if own is None else list(difference(wanted, own))
    for box in missing:
        found = 0
        for held, ranks in holders.items():
            if (part := intersection(box, held)) is None:
                continue
            source = min(ranks, key=lambda holder: (load[holder], abs(holder - rank), holder))
            num_bytes = volume(part) * tensor.itemsize
            load[source] += num_bytes
            found += volume(part)
            yield Move(name, part, source, rank, num_bytes)
        if found != volume(box):
            raise ValueError(f"{name} {box}: rank {rank} wants it and the source layout has {found} of its elements.")


def _cost(source: Layout, target: Layout) -> int:
    """`lower_bound`, with tensors that are divided alike looked at once."""
    alike = Counter((source.tensors[name], wanted) for name, wanted in target.tensors.items())
    return sum(
        count * lower_bound(Layout(source.mesh, {"": held}), Layout(target.mesh, {"": wanted}))
        for (held, wanted), count in alike.items()
    )


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1


def _distinct_orders(factors: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Orders of the factors, as positions; those of one dimension stay in their order among themselves."""
    seen = set()
    for order in permutations([index for index, _ in factors]):
        if order not in seen:
            seen.add(order)
            left = {index: [i for i, (of, _) in enumerate(factors) if of == index] for index in set(order)}
            yield tuple(left[index].pop(0) for index in order)


def _ranks(factors: Sequence[tuple[int, int]], order: Sequence[int]) -> tuple[int, ...]:
    """The rank at each place of the mesh if its factors, from the slowest to the fastest, count in this order."""
    strides, stride = {}, 1
    for position in reversed(order):
        strides[position], stride = stride, stride * factors[position][1]
    ranks = [0]
    for position, (_, size) in enumerate(factors):
        ranks = [rank + place * strides[position] for rank in ranks for place in range(size)]
    return tuple(ranks)


def _cut(move: Move, limit_bytes: int) -> Iterator[Move]:
    """A move as parts of at most `limit_bytes`, cut along its first axis that is longer than 1."""
    if move.num_bytes <= limit_bytes:
        yield move
        return
    axis = next((i for i, (start, stop) in enumerate(move.box) if stop - start > 1), None)
    if axis is None:
        raise ValueError(f"{move.name}: one element takes {move.num_bytes} bytes, the limit is {limit_bytes}.")
    start, stop = move.box[axis]
    row = move.num_bytes // (stop - start)
    step = max(1, limit_bytes // row)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        box = (*move.box[:axis], (first, last), *move.box[axis + 1 :])
        yield from _cut(Move(move.name, box, move.source, move.target, row * (last - first)), limit_bytes)


def _summed(items: Iterable[tuple[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for key, amount in items:
        total[key] += amount
    return total


def _refuse_unequal(source: Layout, target: Layout) -> None:
    if source.mesh.size != target.mesh.size:
        raise ValueError(f"{source.mesh.size} ranks on one side and {target.mesh.size} on the other: must be the same.")
    for name in target.tensors.keys() | source.tensors.keys():
        shapes = [side.tensors[name].shape if name in side.tensors else None for side in (source, target)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name}: shape {shapes[0]} on one side and {shapes[1]} on the other: must be the same.")
