"""Rows and tokens of a step, of which memory and time are computed: of policy gradients and of fine-tuning alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.engines.sharding import NoSharding, Sharding
from verl.trainer.config import PPOSettings

WORTH_PACKING = 0.85  # of the tokens of padded rows, from which down the rows are packed


@dataclass(frozen=True)
class RoleLayout:
    """The processes of a role.

    Attributes:
        sharding: of the role; `NoSharding` for one process.
    """

    sharding: Sharding
    processes: int

    @property
    def shares(self) -> int:
        """Number of data-parallel shares of a step's rows."""
        return self.sharding.row_shares(self.processes)

    @property
    def token_shares(self) -> int:
        """Number of shares of a step's tokens, by rows and within rows."""
        return self.sharding.token_shares(self.processes)

    @property
    def generation_shares(self) -> int:
        """Number of shares of a step's rows where they are generated with the weights that train: each of the processes
        that share tokens or layers' stages has whole weights then.
        """
        degrees = self.sharding.degrees(self.processes)
        return self.shares * degrees.pp * degrees.cp

    @property
    def siblings(self) -> int:
        """Processes that share each layer."""
        return self.sharding.mesh_sizes(self.processes)[2]

    @property
    def expert_ways(self) -> int:
        """Processes that the experts of a layer are divided over."""
        return max(self.siblings, self.sharding.degrees(self.processes).ep)


def role_processes(run: Any) -> dict[str, int]:
    """Number of processes of each role, by `trainer.placement` if it is set."""
    settings, roles = run.trainer, tuple(run.shardings())
    world: int = settings.n_gpus_per_node * settings.nnodes
    return dict.fromkeys(roles, world) if settings.placement is None else settings.placement.sizes(roles, world)


def role_layouts(run: Any) -> dict[str, RoleLayout]:
    """Layout of each role."""
    shardings, counts, alone = run.shardings(), role_processes(run), NoSharding()
    return {role: RoleLayout(x if counts[role] > 1 else alone, counts[role]) for role, x in shardings.items()}


@dataclass(frozen=True)
class Workload:
    """Rows of a step.

    Attributes:
        generates: rows are sampled and scored in the step; otherwise they are those of a data set.
        prompt, response: most tokens of a row, of which rows of a group share the prompt.
        updates_per_row: how often a row is trained on.
    """

    generates: bool
    rows: int
    group_size: int
    prompt: int
    response: int
    mini_batches: int = 1
    updates_per_row: int = 1

    @property
    def width(self) -> int:
        """Most tokens of a row."""
        return self.prompt + self.response

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.mini_batches * self.updates_per_row

    def tokens_per_row(self, run: Any, role: str, is_whole: bool = True, response: int | None = None) -> float:
        """Tokens that a row adds to a packed sequence, in which samples share their prompt.

        Args:
            is_whole: all samples of a prompt are in one micro-batch, which is not so for mini-batches of shuffled rows.
            response: tokens of a response; None: the most.
        """
        response = self.response if response is None else response
        packs = getattr(run.actor if role == "reference" else getattr(run, role), "packing", "off") == "auto"
        shared, padded = response + self.prompt / self.group_size, self.prompt + response
        return shared if packs and is_whole and shared <= WORTH_PACKING * padded else padded

    def lines(self, run: Any) -> Iterator[str]:
        """Batch arithmetic, with every division that leaves a remainder."""
        rows = self.rows
        if not self.generates:
            yield f"A step trains on {rows} sequences in one optimizer step."
            yield from _remainder(rows, role_layouts(run)["actor"].shares, "sequences", "shares of the rows")
            return
        per_update, times, updates = -(-rows // self.mini_batches), self.updates_per_row, self.updates
        yield f"A step draws {rows // self.group_size} prompts x {self.group_size} samples = {rows} rows."
        yield (
            f"They are trained on in {self.mini_batches} mini-batch{'es' * (self.mini_batches > 1)} of {per_update} "
            f"rows, {times} time{'s' * (times > 1)}: {updates} optimizer step{'s' * (updates > 1)}."
        )
        yield from _remainder(rows, self.mini_batches, "rows", "mini-batches")
        for role, layout in role_layouts(run).items():
            if role not in ("actor", "critic"):
                continue
            limit, shares, sharding = getattr(run, role).micro_batch_tokens, layout.shares, layout.sharding
            together = layout.token_shares // shares
            in_share = -(-rows // (self.mini_batches * shares))
            if sharding.pipeline_ways(layout.processes) > 1:
                limit = sharding.micro_batch_tokens(limit, in_share * self.width)
            per = max(1, limit * together // self.width)
            where = "each process" if together == 1 else f"{together} processes that share their tokens"
            yield (
                f"{role}: {in_share} rows of a mini-batch in {where}, at most {self.width} tokens each, in "
                f"{-(-in_share // per)} micro-batch{'es' * (in_share > per)} of {limit * together} tokens."
            )
            yield from _remainder(rows // self.mini_batches, shares, "rows of a mini-batch", "processes")


def workload(run: Any) -> Workload:
    """The rows of a step of a `PPORun` or an `SFTRun`."""
    settings = run.trainer
    if not isinstance(settings, PPOSettings):
        length = getattr(run.data, "max_length", None) or run.actor.micro_batch_tokens
        return Workload(False, settings.batch_size * run.rows_per_sample, 1, 0, length)
    rows, prompt = settings.prompts_per_step * settings.group_size, getattr(run.data, "max_prompt_length", 0)
    algorithm = run.algorithm
    return Workload(
        True, rows, settings.group_size, prompt, run.response_tokens, algorithm.mini_batches, algorithm.epochs
    )


def _remainder(count: int, parts: int, what: str, where: str) -> Iterator[str]:
    if parts > 1 and count % parts:
        yield f"{count} {what} over {parts} {where} leave a remainder of {count % parts}: some have one more."
