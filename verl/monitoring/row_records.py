"""Records of single responses: every one of an evaluation, and some of a training step token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto

MAX_TOKENS = 4096  # of a row; the rest is cut
NUMBERS = ("rollout_log_probs", "old_log_probs", "entropies", "advantages")
DECIMALS = 6


def evaluated_rows(evaluated: Mapping[str, DataProto | None], success: float) -> list[dict[str, Any]]:
    """One record for each response of an evaluation.

    Args:
        evaluated: scored responses by kind: `greedy`, `drawn`, `without_tools`; None if there are none.
        success: a score that counts as right.
    """
    records = []
    for kind, batch in evaluated.items():
        if batch is None:
            continue
        scores, tokens = batch["score"].astype(float).tolist(), batch["response_mask"].sum(dim=1).tolist()
        rows = zip(batch["prompt_ids"].tolist(), batch["sample_ids"].tolist(), scores, tokens, strict=True)
        names = ("kind", "prompt_id", "sample_id", "score", "tokens")
        records += [{**dict(zip(names, (kind, *row), strict=True)), "success": row[2] >= success} for row in rows]
    return records


def token_rows(batch: DataProto, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The first rows of an experience [B S], token by token.

    A list has an entry for each token of the response, observations included; numbers are rounded to `DECIMALS`.

    Args:
        count: number of rows, at most.
        tokenizer: of the policy.
    Returns:
        `prompt_id`, `sample_id`, `score`, `prompt`, and the lists `ids`, `texts`, `mask` (1 on tokens that the policy
        chose), `versions` (of the policy that drew them), and those of `NUMBERS` that the batch has.
    """
    batch = batch[:count]
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, batch["attention_mask"].shape[1] - width :].sum(dim=1).clamp(max=MAX_TOKENS)
    lists = {"ids": batch["responses"], "mask": batch["response_mask"].int()}
    lists |= {name: batch[name].double().round(decimals=DECIMALS) for name in NUMBERS if name in batch}
    lists["versions"] = batch["policy_version"][:, None].expand(-1, width)
    if "token_versions" in batch:
        lists["versions"] = batch["token_versions"]
    rows = []
    for row, length in enumerate(lengths.tolist()):
        of_tokens = {name: values[row, :length].tolist() for name, values in lists.items()}
        rows.append(
            {
                "prompt_id": int(batch["prompt_ids"][row]),
                "sample_id": int(batch["sample_ids"][row]),
                "score": float(batch["score"][row]),
                "prompt": batch["prompt_text"][row],
                **of_tokens,
            }
        )
    texts = token_texts({token for row in rows for token in row["ids"]}, tokenizer)
    return [{**row, "texts": [texts[token] for token in row["ids"]]} for row in rows]


def token_texts(ids: set[int], tokenizer: Any) -> dict[int, str]:
    """The text that each token adds after another one; half a character is the replacement character.

    SentencePiece drops the space before the first token of a text, so each token is decoded twice in a row.
    """
    ordered = sorted(ids)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    once = tokenizer.batch_decode([[token] for token in ordered], **options)
    twice = tokenizer.batch_decode([[token, token] for token in ordered], **options)
    return {token: both[len(first) :] for token, first, both in zip(ordered, once, twice, strict=True)}
