"""A check of a role's batches: some rows, computed as the role does, are compared with a plain forward pass of each.

The execution paths of `verl.model_paths` are checked with the model of the run, in its dtype, and with rows of the run:
the longest, the shortest, and some that share a prompt. The first batch is checked, and each later batch with a longer
row than all checked before.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn

from verl.engines.chunked_logprobs import plain_log_probs, token_log_probs
from verl.engines.engine import Compute, TrainingEngine
from verl.engines.layer_compile import LayerPrograms, programs_of
from verl.errors import ConfigError
from verl.model_paths.check import BOUNDS, WINDOW, beyond_noise, bound_of, chosen_rows, longest_row, row_gaps, tail_for
from verl.model_paths.families import PLAINER
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.ops.masking import LossTotals
from verl.protocol import DataProto

_log = logging.getLogger(__name__)


TRIAL_TOKENS, TRIAL_TOKENS_CPU = 8192, 256  # of a line whose length programs are compiled for


def trial_rows(model: nn.Module, tokens: int) -> DataProto:
    """Eight prompts with four responses of different lengths each, `tokens` in all when packed, or a little less."""
    draw = torch.Generator().manual_seed(0)
    prompt, longest = tokens // 64, 7 * tokens // 256
    size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    prompts = torch.randint(size, (8, prompt), generator=draw).repeat_interleave(4, dim=0)
    responses = torch.randint(size, (32, longest), generator=draw)
    mask = torch.arange(longest) < (longest - torch.arange(32) % 4)[:, None]
    attention = torch.cat([torch.ones_like(prompts), mask.long()], dim=1)
    fields = {"input_ids": torch.cat([prompts, responses * mask], dim=1), "attention_mask": attention}
    fields |= {"position_ids": (attention.cumsum(dim=1) - 1), "responses": responses * mask, "response_mask": mask}
    return DataProto.from_dict(fields)


def with_tail(plain: Compute, engine: TrainingEngine, rows: DataProto) -> Compute:
    """`compute` with tokens appended to each row; collective. See `tail_for`."""
    tail = tail_for(engine.model, engine.parallel.most(longest_row(rows)))
    return lambda model, micro: plain(model, replace(micro, tail=tail))


class FirstBatchCheck:
    """Checks batches of a role, and switches its engine to a simpler execution path if the current one is wrong.

    Args:
        name: configuration path of the model.
        engine: runs the model.
        compute: the role's computation per token; the first of its tensors is compared.
        plain: the same quantity from the model's own forward pass.
    Attributes:
        longest: tokens of the longest row that was checked; batches without a longer row are not checked.
    """

    def __init__(self, name: str, engine: TrainingEngine, compute: Compute, plain: Compute):
        self.name, self.engine, self.compute, self.plain = name, engine, compute, plain
        self.longest = -1

    @classmethod
    def of_tokens(cls, name: str, engine: TrainingEngine, head: LMHead, temperature: float = 1.0) -> FirstBatchCheck:
        """A check of the log-probs of response tokens, which the role computes in chunks."""

        def in_parts(model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
            return {"log_probs": token_log_probs(model, head, micro, temperature, num_chunks=3).log_probs}

        def plain(model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
            return {"log_probs": plain_log_probs(model, micro, temperature)}

        return cls(name, engine, in_parts, plain)

    def check(self, batch: DataProto) -> None:
        """Compare some rows if one is longer than all compared before; collective, with each process's own rows.

        Raises:
            ConfigError: no execution path gives the same results as a plain forward pass of each row.
        """
        longest = self.engine.parallel.most(longest_row(batch))
        if longest <= self.longest:
            return
        if self.longest < 0 and (programs := programs_of(self.engine.model)) is not None:
            self._try_programs(programs)
        which = "the first batch" if self.longest < 0 else f"a batch with one of {longest} tokens"
        self.longest = longest
        rows = batch[chosen_rows(batch)]
        expected, again = self._first(self.engine.infer(rows, self.plain, alone=True)), None
        first = self.engine.parallel.most(PLAINER.index(self.engine.paths(rows).scoring))
        worst = 0.0
        for scoring in PLAINER[first:]:
            if scoring != PLAINER[first]:
                self.engine.limit(scoring)
            found = self._computed(rows, expected)
            difference = self.difference(found, expected, rows)
            if difference > self._bound():
                if again is None:
                    again = self.engine.infer(rows, with_tail(self.plain, self.engine, rows), alone=True, replays=False)
                difference = self.difference(found, expected, rows, self._first(again))
            if difference <= self._bound():
                if scoring != PLAINER[first]:
                    before, now = (path.replace("_", " ") for path in (PLAINER[first], scoring))
                    _log.warning(
                        "%s is a %s: as %s batches, rows of %s have different results than each row alone "
                        "(%.2g on average). From here on rows are run as %s batches.",
                        self.name, type(self.engine.model).__name__, before, which, worst, now,
                    )  # fmt: skip
                return
            worst = max(worst, difference)
            if self.engine.parallel.context is not None:
                raise ConfigError(
                    f"{self.name} is a {type(self.engine.model).__name__}: rows of {which} have different "
                    f"results when processes share their tokens ({worst:.2g} on average). Set sharding.cp=1."
                )
        raise ConfigError(
            f"{self.name} is a {type(self.engine.model).__name__}: rows of {which} have different results "
            f"in a batch and alone ({worst:.2g} on average), however they are run. Choose another attention "
            "implementation or another model."
        )

    def _try_programs(self, programs: LayerPrograms) -> None:
        """Compile the layers on rows of a fixed length, with gradients and without, and use them from here on if the
        values and the norm of the gradients are those of the plain layers; collective."""
        engine = self.engine
        rows = trial_rows(engine.model, TRIAL_TOKENS if engine.device.type == "cuda" else TRIAL_TOKENS_CPU)
        if programs.is_optional and (
            engine.micro_batch_tokens < TRIAL_TOKENS or engine.paths(rows).scoring != "packed"
        ):
            return
        (wanted, norm), reason = self._tried(rows), ""
        try:
            programs.are_used = True
            found, compiled_norm = self._tried(rows)
            difference = self.difference(found, wanted, rows)
            if not difference <= self._bound() >= abs(compiled_norm - norm) / max(norm, 1e-12):
                reason = (
                    f"results differ by {difference:.2g}, the norm of gradients is {compiled_norm:.4g}, not {norm:.4g}"
                )
        except Exception as error:
            if not programs.is_optional:
                raise
            reason = f"{type(error).__name__}: {str(error)[:300]}"
        engine.release()
        if reason:
            programs.are_used = False
            _log.warning("%s: its layers are not compiled: %s", self.name, reason)

    def _tried(self, rows: DataProto) -> tuple[Tensor | None, float]:
        """Values of rows, and the norm of the gradients of their sum; 0 without an optimizer."""
        engine, values = self.engine, self._first(self.engine.infer(rows, self.compute))
        if engine.optimizer is None:
            return values, 0.0

        def loss(model: nn.Module, micro: MicroBatch, totals: LossTotals) -> tuple[Tensor, dict[str, Tensor]]:
            return next(iter(self.compute(model, micro).values())).sum() / totals.tokens, {}

        engine.forward_backward(rows, loss)
        norm = float(engine.parallel.clip(engine.parameters.values(), None))
        engine.release()
        return values, norm

    def difference(
        self, found: Tensor | None, wanted: Tensor | None, rows: DataProto, again: Tensor | None = None
    ) -> float:
        """Mean difference over the tokens of a row, maximum over rows and processes. With `again`, the results of
        `with_tail`, rows whose plain forward passes differ as much from each other are ignored."""
        largest, mask = 0.0, rows["response_mask"]
        least = 1 if self._bound() <= BOUNDS[torch.float32] else WINDOW
        if found is not None and wanted is not None and bool(mask.any()):
            gaps = row_gaps(found, wanted, mask, least)
            if again is not None:
                gaps = beyond_noise(gaps, row_gaps(again, wanted, mask, least))
            largest = float(gaps.max())
        return self.engine.parallel.most(int(min(largest, 1e6) * 1e9)) / 1e9

    def _computed(self, rows: DataProto, wanted: Tensor | None) -> Tensor | None:
        """Values as the role computes them; NaN if our attention does not support the model."""
        try:
            return self._first(self.engine.infer(rows, self.compute))
        except NotImplementedError as error:
            _log.warning("%s is a %s: %s.", self.name, type(self.engine.model).__name__, error)
            return None if wanted is None else torch.full_like(wanted, torch.nan)

    def _bound(self) -> float:
        return bound_of(next(iter(self.engine.parameters.values())).dtype, self.engine.autocast)

    @staticmethod
    def _first(found: dict[str, Tensor]) -> Tensor | None:
        return next(iter(found.values()), None)
