"""Episodes as training rows: the mask is True on the model's tokens and False on observations; with a record of each
turn.

prompt | turn 0 | observation 0 | turn 1 | observation 1 | ... | turn n
mask         1          0            1          0                  1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, assemble

if TYPE_CHECKING:
    from verl.environments.episode_loop import Episode


def rows_of_episodes(
    prompts: DataProto, request: GenerationRequest, episodes: Sequence[Episode], pad_id: int, dtype: torch.dtype
) -> DataProto:
    """Rows in the form of `rollout.base.assemble`, with `turn_ids`, `turn_rewards` [B T], `episode_ids` [B], and the
    record of each episode as `episode` in `non_tensor_batch`. A dropped episode has an empty mask."""
    width = max((len(episode.response) for episode in episodes if episode.end != "dropped"), default=0)
    width = max(width, 1)
    shape = (len(episodes), width)
    responses = torch.full(shape, pad_id, dtype=torch.int64)
    mask, attended = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    log_probs, rewards = torch.zeros(shape, dtype=dtype), torch.zeros(shape)
    turn_ids = torch.full(shape, -1, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        if episode.end == "dropped":
            continue
        length = len(episode.response)
        responses[row, :length] = torch.tensor(episode.response)
        attended[row, :length] = True
        turn_ids[row, : episode.opening] = 0
        for index, turn in enumerate(episode.turns):
            end = turn.start + len(turn.tokens)
            mask[row, turn.start : end] = True
            log_probs[row, turn.start : end] = torch.tensor(turn.log_probs, dtype=dtype)
            turn_ids[row, turn.start : end + turn.observed] = index
            rewards[row, end - 1] = turn.reward
    made = assemble(prompts, request.num_samples, responses, mask, log_probs, pad_id, attended)
    cut = made["responses"].shape[1]
    record: Any = [episode_record(episode) for episode in episodes]
    fields = {
        "turn_ids": turn_ids[:, :cut],
        "turn_rewards": rewards[:, :cut],
        "episode_ids": made["prompt_ids"] * request.num_samples + made["sample_ids"],
    }
    return made.union(DataProto.from_dict(fields, non_tensors={"episode": record}))


def episode_record(episode: Episode) -> dict[str, Any]:
    """The record of an episode in plain values, turn by turn, for metrics and sample tables."""
    return {
        "end": episode.end,
        "reward": episode.reward,
        "seconds": episode.seconds,
        "attempts": episode.attempt,
        "infra": list(episode.infra),
        "journal": {"reused": episode.reused, "replayed": episode.replayed, "restarted": int(episode.restarted)},
        "turns": [
            {
                "text": turn.text,
                "tokens": len(turn.tokens),
                "is_complete": turn.is_complete,
                "reward": turn.reward,
                "observation": turn.observation
                if isinstance(turn.observation, (str, type(None)))
                else [dict(m) for m in turn.observation],
                "observed": turn.observed,
                "parse_errors": turn.parse_errors,
                "calls": [dict(vars(call)) for call in turn.calls],
            }
            for turn in episode.turns
        ],
        "calls": [dict(vars(call)) for call in episode.calls],
    }


def response_texts(rows: DataProto, tokenizer: Any) -> list[str]:
    """The text of each response, for rewards and sample tables; for an episode the text of the model's last turn."""
    episodes = rows.non_tensor_batch.get("episode")
    if episodes is not None:
        return [record["turns"][-1]["text"] if record["turns"] else "" for record in episodes]
    tokens = [r[m].tolist() for r, m in zip(rows["responses"], rows["response_mask"], strict=True)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def kept_rows(rows: DataProto) -> DataProto:
    """The rows without dropped episodes."""
    if "episode" not in rows.non_tensor_batch:
        return rows
    kept = [place for place, episode in enumerate(rows["episode"]) if episode["end"] != "dropped"]
    if not kept:
        raise RolloutError(
            "environment: every episode of this step failed for reasons outside of the model, and was left out "
            "(environment.on_infra). The last: " + "; ".join(rows["episode"][-1]["infra"][-1:])
        )
    if len(kept) == len(rows):
        return rows
    chosen = rows[kept]
    chosen["episode"][0]["left_out"] = len(rows) - len(kept)
    return chosen
