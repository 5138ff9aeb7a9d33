"""Rows with images on two processes, one of which has none: losses and gradients are those of one process."""

from pathlib import Path

import pytest
import torch
from cases import each_value_once
from equivalence.one_update import same_update
from image_models import PLACEHOLDERS, picture, save_image_model

from verl.engines.sharding import DDP, FSDP
from verl.models.images import images_of
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.rows import left_padded, media_fields, sequence_fields

pytestmark = pytest.mark.xdist_group("laboratory of two")


def rows_with_images(source: Pretrained, family: str, images: list[list[int]]) -> DataProto:
    """Rows whose prompts have images of these seeds; the first rows are the longest."""
    tokenizer = source.load_tokenizer()
    processor = images_of(tokenizer)
    assert processor is not None
    texts = [PLACEHOLDERS[family] * len(seeds) + "how many?" * (4 - row) for row, seeds in enumerate(images)]
    encoded = [processor.encode(text, list(map(picture, seeds))) for text, seeds in zip(texts, images, strict=True)]
    prompts, prompt_mask = left_padded([ids for ids, _ in encoded], 0)
    draw = torch.Generator().manual_seed(0)
    responses = torch.randint(4, 90, (len(images), 6), generator=draw)
    mask = torch.arange(6) < torch.tensor([6, 3, 5, 4])[:, None]
    fields = sequence_fields(prompts, prompt_mask, responses * mask, mask)
    advantages = torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask
    fields |= {"responses": responses * mask, "response_mask": mask, "advantages": advantages}
    media = [(1 + sum(seeds) if seeds else 0, x or None) for seeds, (_, x) in zip(images, encoded, strict=True)]
    return DataProto.from_dict(fields).union(media_fields(media))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sharding"), each_value_once(["idefics3", "qwen3_vl"], {"ddp": DDP(), "fsdp": FSDP()})
)
def test_two_processes_make_the_update_of_one(family, sharding, two_processes, tmp_path: Path):
    path = save_image_model(tmp_path / "model", family)
    source = Pretrained(path=str(path), dtype="float64")
    for images in ([[1, 2], [], [], []], [[1], [3], [1], []]):
        same_update(two_processes, source, rows_with_images(source, family, images), sharding, exact=True)
