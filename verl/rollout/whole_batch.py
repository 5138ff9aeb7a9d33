"""An engine of the user's that answers whole batches, as a `RolloutEngine`."""

from __future__ import annotations

import torch

from verl.ops.sampling import TRAINING
from verl.protocol import DataProto
from verl.rollout.base import (
    DrawnTurn,
    GenerationRequest,
    RolloutEngine,
    TurnEngine,
    TurnLimits,
    TurnQueue,
    TurnRequest,
)
from verl.rollout.rows import left_padded


class WholeBatchEngine(RolloutEngine):
    """An engine with one method, `generate`; it cannot generate several turns of an episode.

    Attributes:
        pad_id: fills prompts on the left.
    """

    pad_id: int = 0

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Rows of responses, `num_samples` for each prompt in the order of the prompts; see `assemble`."""
        raise NotImplementedError

    def turns(self, limits: TurnLimits) -> TurnEngine:
        return _WholeBatchTurns(self)


class _WholeBatchTurns(TurnQueue):
    def __init__(self, engine: WholeBatchEngine):
        super().__init__()
        self.engine = engine

    def advance(self) -> list[DrawnTurn]:
        turns, self.queue = self.queue, []
        n = 1 + max((turn.sample_id for turn in turns), default=0)
        first = turns[0] if turns else TurnRequest(0, [], 0, 0, 0, 0, 0, TRAINING)
        request = GenerationRequest(first.step, n, first.greedy, first.stream)
        tokens, mask = left_padded([turn.tokens for turn in turns[::n]], self.engine.pad_id)
        prompt_ids = torch.tensor([turn.prompt_id for turn in turns[::n]], dtype=torch.int64)
        fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": prompt_ids}
        prompts = DataProto.from_dict(fields | {"group_ids": torch.arange(len(tokens))})
        rows = self.engine.generate(prompts, request)
        self.dtype = rows["rollout_log_probs"].dtype
        columns = zip(turns, rows["responses"], rows["response_mask"], rows["rollout_log_probs"], strict=True)
        return [
            DrawnTurn(turn.episode, ids[made].tolist(), log_probs[made].tolist(), int(made.sum()) < turn.max_new_tokens)
            for turn, ids, made, log_probs in columns
        ]
