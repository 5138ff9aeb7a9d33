"""Rows of a trial, and what each way of running a model gives for them.

Every row has a prompt and a response that is given, not drawn. The numbers compared are log-probs, in nats, of the
tokens of the response and of some others in their place; for a model without a language-model head they are its last
states, projected onto as many directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.model_paths.decode import Decoder
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.model_paths.paths import ModelPaths
from verl.models.call import call_model
from verl.ops.logprobs import response_positions
from verl.protocol import DataProto

OTHERS = 7  # tokens beside the given one whose log-probs are compared
STRIDE = 11  # between them


@dataclass(frozen=True)
class TrialRow:
    """A prompt [P] and a response [T] to it."""

    prompt: Tensor
    response: Tensor

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.response])


def random_tokens(length: int, token_ids: tuple[int, int], seed: int) -> Tensor:
    """[length] ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*token_ids, (length,), generator=generator)


def as_batch(rows: Sequence[TrialRow]) -> DataProto:
    """Rows as training has them: prompts padded on the left, responses on the right."""
    width = max(len(row.prompt) for row in rows)
    longest = max(len(row.response) for row in rows)
    ids = torch.zeros(len(rows), width + longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        cut = slice(width - len(row.prompt), width + len(row.response))
        ids[place, cut], attention[place, cut] = row.tokens, 1
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0),
            "responses": ids[:, width:],
            "response_mask": attention[:, width:].bool(),
        }
    )


@torch.no_grad()
def states_of(model: Any, **inputs: Any) -> Tensor:
    """Logits [b s V], or the last states [b s D] of a model without a language-model head."""
    output = call_model(model, use_cache=False, **inputs)
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state


def numbers_of(model: Any, states: Tensor, tokens: Tensor) -> Tensor:
    """[n 1 + OTHERS] float64 of states [n V or D] that predict the tokens [n]."""
    if states.shape[-1] < model.config.get_text_config().vocab_size:
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(states.shape[-1], 1 + OTHERS, generator=generator, dtype=torch.float64)
        return states.double().cpu() @ (directions / states.shape[-1] ** 0.5)
    chosen = (tokens[:, None] + STRIDE * torch.arange(1 + OTHERS, device=tokens.device)) % states.shape[-1]
    return states.double().log_softmax(dim=-1).gather(-1, chosen).cpu()


def alone(model: Any, row: TrialRow, **inputs: Any) -> Tensor:
    """The numbers of a response [T n] from a plain forward pass of its row: no other row, no padding, no cache."""
    states = states_of(model, input_ids=row.tokens[None], **inputs)
    return numbers_of(model, response_positions(states, len(row.response))[0], row.response)


def scored(model: Any, rows: Sequence[TrialRow], paths: ModelPaths) -> list[Tensor]:
    """The numbers of each response as training computes them, by the product's own micro-batches."""
    found: dict[int, Tensor] = {}
    for micro in cut_into_micro_batches(as_batch(rows), 10**6, paths):
        mask = micro.tensors["response_mask"]
        if paths.scoring == "packed":  # else it was not tried
            whole = int(micro.tensors["attention_mask"].sum()) - len(micro.rows)
            assert micro.packing is not None
            assert (len(micro.packing.tokens) < whole) == paths.shares_prompts
        states = micro.predict(lambda **inputs: states_of(model, **inputs))
        numbers = numbers_of(model, states, micro.tensors["responses"][mask])
        parts = numbers.split(mask.sum(dim=1).tolist())
        found.update(zip(micro.rows.tolist(), parts, strict=True))
    return [found[row] for row in range(len(rows))]


def decoded(model: Any, rows: Sequence[TrialRow], n: int, paths: ModelPaths) -> list[Tensor]:
    """The numbers of each response as sampling computes them, by the product's own decode loop.

    Args:
        rows: each n in turn are responses to one prompt. Each ends in a token that no other place of a response has.
    """
    prompts = [rows[place].prompt for place in range(0, len(rows), n)]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    stop = int(rows[0].response[-1])
    decoder = Decoder(
        model=model,
        paths=paths,
        stop_ids=torch.tensor([stop]),
        pad_id=0,
        max_new_tokens=max(len(row.response) for row in rows),
    )
    found: list[list[Tensor]] = [[] for _ in rows]
    for batch in decoder.batches(lengths, len(prompts)):
        members = [int(prompt) * n + sample for prompt in batch for sample in range(n)]

        def choose(logits: Tensor, live: Tensor, t: int, members: list[int] = members) -> Tensor:
            given = [rows[members[row]].response for row in live.tolist()]
            tokens = torch.stack([response[min(t, len(response) - 1)] for response in given])
            numbers = numbers_of(model, logits, tokens)
            for row, response, line in zip(live.tolist(), given, numbers, strict=True):
                if t < len(response):
                    found[members[row]].append(line)
            return tokens

        width = int(lengths[batch].max())
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.bool)
        for place, prompt in enumerate(batch.tolist()):
            tokens[place, width - len(prompts[prompt]) :] = prompts[prompt]
            mask[place, width - len(prompts[prompt]) :] = True
        decoder.decode(tokens, mask, n, choose)
    return [torch.stack(lines) for lines in found]


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of two sets of numbers; infinite where they are not finite."""
    largest = max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in zip(found, wanted))
    return largest if largest == largest else float("inf")
