"""Scored rows for tests, ragged and seeded."""

import torch

from verl.protocol import DataProto


def scored_rows(count: int, seed: int = 0, version: int = 0, longest: int = 12, group_size: int = 2) -> DataProto:
    """Rows with prompts of up to 6 and responses of up to `longest` tokens, padded as an engine pads them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {"P": torch.randint(1, 7, (count,), generator=generator)}
    lengths["T"] = torch.randint(1, longest + 1, (count,), generator=generator)
    p, t = int(lengths["P"].max()), int(lengths["T"].max())
    prompt_mask = torch.arange(p) >= p - lengths["P"][:, None]
    there = torch.arange(t) < lengths["T"][:, None]
    prompts = torch.randint(1, 1000, (count, p), generator=generator) * prompt_mask
    responses = torch.randint(1, 1000, (count, t), generator=generator) * there
    attention = torch.cat([prompt_mask, there], dim=1).long()
    chosen = there & (torch.rand(count, t, generator=generator) < 0.8)  # the rest was written by a tool
    groups = torch.arange(count) // group_size
    tensors = {
        "prompts": prompts, "prompt_mask": prompt_mask, "prompt_ids": groups + 100 * seed, "group_ids": groups,
        "sample_ids": torch.arange(count) % group_size, "responses": responses, "response_mask": chosen,
        "input_ids": torch.cat([prompts, responses], dim=1), "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0), "policy_version": torch.full((count,), version),
        "rollout_log_probs": torch.randn(count, t, generator=generator) * there,
        "token_level_scores": torch.rand(count, t, generator=generator) * chosen,
        "advantages": torch.randn(count, t, generator=generator) * chosen,
        "greedy_scores": torch.rand(count, generator=generator),
    }  # fmt: skip
    texts = [f"response {seed}-{row}" for row in range(count)]
    return DataProto.from_dict(tensors, {"response_text": texts, "length": list(range(count))})
