"""Scripted responses: for tests, and for replaying text that another system wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast, compute_device, computing_in, weights_gathered
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import ALONE, GenerationRequest, Rollout, RolloutEngine, assemble, stop_tokens


@component
class ScriptedRollout(Rollout):
    """Answer from a list; the log-probabilities are the model's own for that text.

    Sample i of the prompt with id p takes entry (p * num_samples + i) of the list, counted round and round.

    Args:
        texts: the responses; each is ended by the end-of-text token unless it fills `max_new_tokens`.
    """

    takes_stages: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = True
    takes_modules: ClassVar[bool] = True

    texts: Annotated[tuple[str, ...], Field(min_length=1)]

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        for name, unset in (("top_k", 0), ("top_p", 1.0), ("min_new_tokens", 0), ("stop_token_ids", ())):
            if getattr(self, name) != unset:
                yield f"{name} is {getattr(self, name)!r}: given responses are not drawn. Leave it at {unset!r}."

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> ScriptedSampler:
        return ScriptedSampler(self, model, tokenizer, autocast)


class ScriptedSampler(RolloutEngine):
    """The running engine of `ScriptedRollout`."""

    def __init__(self, options: ScriptedRollout, model: Any, tokenizer: Any, autocast: Autocast = None):
        self.options, self.model = options, model
        self.autocast: Autocast = autocast
        self.pad_id = tokenizer.pad_token_id
        end = [int(stop_tokens(model, tokenizer, ())[0])]
        limit = options.max_new_tokens
        self.script = [(tokenizer(text, add_special_tokens=False).input_ids + end)[:limit] for text in options.texts]

    @torch.no_grad()
    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """See `RolloutEngine.generate`."""
        self.model.eval()
        n = request.num_samples
        entries = (prompts.batch["prompt_ids"][:, None] * n + torch.arange(n)).flatten() % len(self.script)
        lines = [torch.tensor(self.script[entry]) for entry in entries.tolist()]
        width = max((len(line) for line in lines), default=0)
        responses = torch.full((len(lines), width), self.pad_id)
        mask = torch.zeros_like(responses, dtype=torch.bool)
        for row, line in enumerate(lines):
            responses[row, : len(line)] = line
            mask[row, : len(line)] = True
        rows = assemble(prompts, n, responses, mask, torch.zeros(responses.shape), self.pad_id)
        with weights_gathered(self.model):
            return assemble(prompts, n, responses, mask, self._log_probs(rows), self.pad_id)

    def _log_probs(self, rows: DataProto) -> Tensor:
        if not len(rows):
            return torch.zeros(rows.batch["responses"].shape)
        device = compute_device(self.model)
        fields = {name: rows.batch[name].to(device) for name in ("input_ids", "attention_mask", "position_ids")}
        responses = rows.batch["responses"].to(device)
        with computing_in(self.autocast, self.model):
            logits = response_positions(self.model(**fields, use_cache=False).logits, responses.shape[1])
        return log_probs_of(logits, responses, self.options.temperature).cpu()
