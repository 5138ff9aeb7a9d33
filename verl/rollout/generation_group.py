"""Division of generation among the processes that hold one model.

    gather    prompts of this process ──> those that it generates for     one part per owner of the prompts
    run       generation, in the processes that got a part; all of them fail together
    scatter   rows of the parts ──> rows of this process's prompts

`GenerationGroup`: each process generates for its own prompts. `SplitPrompts`: processes with the same prompts generate
a share each. `OneGenerates`: the first of some siblings generates for all of them.

The processes agree on the outcome of an engine that may fail: all continue, or all stop. Each rank does its part, which
may fail; then all ranks exchange the outcomes, so that none waits in a collective for a rank that has failed. A part
may take long: an engine without progress is killed only after `rollout.call_timeout_s`, and starting another one may
take minutes. So the ranks first meet in the store of torch.distributed, where waiting has no limit, before they use a
collective operation, which has one (`sharding.timeout_s`). If a rank dies meanwhile, the driver, which watches all of
them, ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.models.parallel_info import ParallelInfo, meet
from verl.protocol import DataProto

T = TypeVar("T")


class RepeatGeneration(Exception):
    """Raised by `GenerationGroup.run` in all processes: generate once more, with weights that are sent anew."""


class GenerationGroup:
    """Each process generates for its own prompts.

    Attributes:
        tensor_group: process group of those that generate the same turns together; None if each process does alone.
    """

    tensor_group: Any = None

    def gather(self, prompts: DataProto) -> list[DataProto]:
        """The prompts that this process generates for, one batch per owner; an empty list for none. Collective."""
        return [prompts]

    def run(self, generate: Callable[[], T]) -> T:
        """The result of generation. Collective.

        Raises:
            RepeatGeneration: it failed, and can be repeated.
        """
        return generate()

    def scatter(self, rows: Sequence[DataProto]) -> DataProto:
        """The rows of this process's prompts, from the rows of all parts. Collective."""
        return rows[0]


class SplitPrompts(GenerationGroup):
    """Processes with the same prompts generate a share each.

    Args:
        parallel_info: its `generation_groups` are the groups of such processes, nested from large to small.
    """

    def __init__(self, parallel_info: ParallelInfo):
        self.parallel_info, self.tensor_group = parallel_info, parallel_info.tensor_group

    def gather(self, prompts: DataProto) -> list[DataProto]:
        import torch.distributed as dist

        for group in self.parallel_info.generation_groups:
            count, rank = dist.get_world_size(group), dist.get_rank(group)
            prompts = prompts[len(prompts) * rank // count : len(prompts) * (rank + 1) // count]
        return [prompts]

    def scatter(self, rows: Sequence[DataProto]) -> DataProto:
        import torch.distributed as dist

        joined = rows[0]
        if self.parallel_info.generation_groups:
            meet(self.parallel_info)  # siblings wait for the rows of environments, which may take long
        for group in reversed(self.parallel_info.generation_groups):
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, joined, group=group)
            joined = DataProto.concat(parts)
        return joined


class OneGenerates(GenerationGroup):
    """The first of the siblings generates for all of them.

    Args:
        num_same_rows: number of consecutive siblings with the same prompts.
        prepare: called by all processes before each generation.
        may_repeat: whether a failure of this process may be retried.
        on_failure: called by all processes after a failure; raises unless they shall retry.
        on_success: called after each generation.
    """

    def __init__(
        self,
        parallel_info: ParallelInfo,
        num_same_rows: int,
        prepare: Callable[[], None] = lambda: None,
        may_repeat: Callable[[Exception], bool] = lambda error: False,
        on_failure: Callable[[ConsensusFailed], None] | None = None,
        on_success: Callable[[], None] = lambda: None,
    ):
        self.parallel_info, self.num_same_rows = parallel_info, num_same_rows
        self.prepare, self.may_repeat = prepare, may_repeat
        self.on_failure, self.on_success = on_failure, on_success

    @property
    def generates(self) -> bool:
        """Whether this process generates."""
        return self.parallel_info.rank == self.parallel_info.siblings[0]

    def gather(self, prompts: DataProto) -> list[DataProto]:
        self.prepare()
        is_same = len(self.parallel_info.siblings) == self.num_same_rows
        parts = [prompts] if is_same else among_siblings(self.parallel_info, prompts)[:: self.num_same_rows]
        return parts if self.generates else []

    def run(self, generate: Callable[[], T]) -> T:
        results: list[T] = []
        try:
            consensus(self.parallel_info, lambda: results.append(generate()), self.may_repeat)
        except ConsensusFailed as failed:
            if self.on_failure is None:
                raise failed.error from failed
            self.on_failure(failed)
            raise RepeatGeneration from failed
        self.on_success()
        return results[0]

    def scatter(self, rows: Sequence[DataProto]) -> DataProto:
        of_parts, info = from_first(self.parallel_info, rows), self.parallel_info
        return of_parts[info.siblings.index(info.rank) // self.num_same_rows]  # pipeline stages are not consecutive


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank's part.

    Attributes:
        rank: of the process.
        error: what was raised there.
        may_repeat: whether it may be retried.
    """

    rank: int
    error: Exception
    may_repeat: bool


class ConsensusFailed(Exception):
    """A rank failed; raised in all processes."""

    def __init__(self, failures: list[RankFailure]):
        self.failures = failures
        super().__init__("; ".join(f"rank {failure.rank}: {failure.error}" for failure in failures))

    @property
    def may_repeat(self) -> bool:
        """Whether all failures may be retried."""
        return all(failure.may_repeat for failure in self.failures)

    @property
    def error(self) -> Exception:
        """The error to report: one that cannot be retried, if there is one."""
        return min(self.failures, key=lambda failure: failure.may_repeat).error


def consensus(parallel_info: ParallelInfo, part: Callable[[], T], may_repeat: Callable[[Exception], bool]) -> list[T]:
    """The outcome of each process, by rank. Collective over the processes of the model.

    Raises:
        ConsensusFailed: one of them failed.
    """
    try:
        outcome: Any = part()
    except Exception as error:  # noqa: BLE001 - sent to all
        outcome = RankFailure(parallel_info.rank, error, may_repeat(error))
    outcomes: list[Any] = [outcome]
    if parallel_info.mesh.size > 1:
        import torch.distributed as dist

        meet(parallel_info)
        outcomes = [None] * parallel_info.mesh.size
        dist.all_gather_object(outcomes, outcome)
    if failures := [value for value in outcomes if isinstance(value, RankFailure)]:
        raise ConsensusFailed(failures)
    return outcomes


def among_siblings(parallel_info: ParallelInfo, value: T) -> list[T]:
    """All-gather of objects among siblings, in their order."""
    if len(parallel_info.siblings) == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * len(parallel_info.siblings)
    dist.all_gather_object(values, value, group=parallel_info.sibling_group)
    return values


def from_first(parallel_info: ParallelInfo, value: T) -> T:
    """Broadcast of an object from the first sibling."""
    if len(parallel_info.siblings) == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=parallel_info.siblings[0], group=parallel_info.sibling_group)
    return box[0]
