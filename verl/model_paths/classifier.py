"""Batching of a reward model's texts, determined by a check on a small copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.model_paths.check import TOLD_APART, TOLERANCE, finding_for
from verl.model_paths.paths import PLAIN, ModelPaths, PathFinding
from verl.model_paths.trial import distance, random_tokens
from verl.model_paths.twin import ROW_TOKENS, NoTwin, make_twin
from verl.models.call import unwrapped
from verl.models.heads import RewardHeadModel

TextBatches = Literal["padded", "equal_lengths"]


def text_batches_for(model: Any, row_tokens: int) -> TextBatches:
    """Whether texts of several lengths may be scored together, with padding on the right, or only those of one length.

    Args:
        model: any module that returns `scores`. One that is not a classifier of transformers is taken by its word.
        row_tokens: of the longest text.
    Raises:
        ConfigError: the score of a text depends on the texts beside it, whatever their lengths.
    """
    if not isinstance(model, RewardHeadModel):
        return "padded"
    finding = finding_for(model.classifier, row_tokens, examine_classifier, _not_tried)
    if finding.refusal is not None:
        raise ConfigError(f"model is a {type(unwrapped(model.classifier)).__name__}: {finding.refusal}")
    return "padded" if finding.paths.scoring == "padded" else "equal_lengths"


def examine_classifier(classifier: Any, row_tokens: int) -> PathFinding:
    """Score texts of many lengths alone and beside each other."""
    try:
        twin = make_twin(classifier, row_tokens)
        model = RewardHeadModel(twin.model)
        lengths = [ROW_TOKENS, 150, 9, 5, *(max(1, n + by) for n in twin.lengths for by in (-1, 1))]
        texts = [random_tokens(length, twin.token_ids, seed) for seed, length in enumerate(lengths)]
        wanted = [score_texts(model, [text]) for text in texts]
        again = [score_texts(model, [text]) for text in reversed(texts)]
        blind = [
            place
            for place in twin.lengths
            if 0 < _moved(classifier, row_tokens, place, texts[0], wanted[0]) < TOLD_APART and place not in twin.parts
        ]
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
        kind = "" if isinstance(error, NoTwin) else f"{type(error).__name__}: "
        return _not_tried(f"{kind}{error}", classifier, row_tokens)
    if blind:
        return PathFinding(
            replace(PLAIN, reasons=(f"a small model of its kind does not show a change at {blind[0]} tokens",))
        )
    if distance(again, wanted[::-1]) > TOLERANCE:
        return PathFinding(PLAIN, "the score of a text depends on those that were scored before it.")
    together = distance([score_texts(model, texts)], [torch.cat(wanted)])
    if together <= TOLERANCE:
        return PathFinding(ModelPaths(scoring="padded"), None, {"padded": together})
    twice = distance([score_texts(model, [text, text.flip(0)])[:1] for text in texts], wanted)
    found = {"padded": together, "equal lengths": twice}
    why = f"texts of several lengths beside each other: their scores differ by {together:.2g}"
    refusal = None if twice <= TOLERANCE else "the score of a text depends on the texts that are scored beside it."
    return PathFinding(replace(PLAIN, reasons=(why,)), refusal, found)


def _not_tried(reason: str, classifier: Any, row_tokens: int) -> PathFinding:
    return PathFinding(replace(PLAIN, reasons=(f"no small model of its kind could be tried ({reason})",)))


@torch.no_grad()
def score_texts(model: RewardHeadModel, texts: Sequence[Tensor]) -> Tensor:
    """[b] float64, of texts beside each other, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return model(input_ids=ids, attention_mask=mask).scores.double()


def _moved(classifier: Any, row_tokens: int, place: int, text: Tensor, wanted: Tensor) -> float:
    other = make_twin(classifier, row_tokens, moved=(place, 1))
    return distance([score_texts(RewardHeadModel(other.model), [text])], [wanted])
