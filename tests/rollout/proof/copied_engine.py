"""A rollout engine with weights of its own: transformers on a copy of the model, synced, and proven as vLLM is."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from verl.component import component
from verl.rollout.base import SyncResult
from verl.rollout.hf import HFEngine, HFRollout
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof.fingerprints import fingerprint
from verl.rollout.proof.probe import probe_rows
from verl.rollout.proof.verifier import SyncVerifier, VerifyReply, VerifyRequest


@component
class CopyRollout(HFRollout):
    """Samples from a copy.

    Args:
        syncs: how many are carried out; those after do nothing, and say nothing of it.
    """

    syncs: int = 1000

    def attach(self, model: Any, tokenizer: Any, seed: int, autocast: Any = None, context: Any = None) -> CopySampler:
        return CopySampler(self, model, tokenizer, seed, autocast)


class CopySampler(HFEngine):
    """The running engine of `CopyRollout`."""

    def __init__(self, options: CopyRollout, model: Any, tokenizer: Any, seed: int, autocast: Any = None):
        super().__init__(options, copy.deepcopy(model), tokenizer, seed, autocast)
        self.left = options.syncs
        self.prover = SyncVerifier(
            model, torch.float32, probe_rows(len(tokenizer), 64), partial(trainer_log_probs, model)
        )

    def sync(self) -> SyncResult:
        question = self.prover.question()
        held = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in self.prover.model.named_parameters():
                self.prover.add_fingerprint(name, tensor)
                if self.left > 0:
                    held[name].copy_(tensor)
        self.left -= 1
        return SyncResult("copied", self.prover.verify(self._answer(question)))

    def _answer(self, question: VerifyRequest) -> VerifyReply:
        named = self.model.named_parameters(remove_duplicate=False)
        fingerprints = {name: fingerprint(tensor, question.vectors) for name, tensor in named}
        return VerifyReply(fingerprints, trainer_log_probs(self.model, question.rows))
