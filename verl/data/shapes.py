"""Pictures of shapes, made by NumPy, and questions about them: how many there are, and which shape it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from verl.component import BuildContext, Description, component
from verl.data.base import DataSplits, PromptSource, Split, TextSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

if TYPE_CHECKING:
    from PIL.Image import Image

CELL, CELLS = 16, 3  # pixels of a cell, and cells along each side of a picture
SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ((220, 40, 40), (40, 180, 60), (50, 80, 220), (230, 210, 40))
COUNT, NAME = "how many?", "which shape?"


def picture(chosen: np.random.Generator, count: int, shape: str) -> Image:
    """A picture with so many copies of a shape in one color, of random sizes at random places."""
    from PIL import Image

    pixels = np.full((CELLS * CELL, CELLS * CELL, 3), 255, np.uint8)
    color = COLORS[chosen.integers(len(COLORS))]
    y, x = np.mgrid[:CELL, :CELL]
    for cell in chosen.permutation(CELLS**2)[:count]:
        radius = chosen.uniform(0.3, 0.45) * CELL
        middle = CELL / 2 + chosen.uniform(-1, 1, 2) * (CELL / 2 - radius)
        top, left = (int(place) * CELL for place in divmod(cell, CELLS))
        pixels[top : top + CELL, left : left + CELL][_inside(shape, x - middle[0], y - middle[1], radius)] = color
    return Image.fromarray(pixels)


def _inside(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Whether points, relative to the middle of a shape, are inside of it."""
    if shape == "circle":
        return x**2 + y**2 <= radius**2
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85 * radius
    if shape == "triangle":
        return (y <= 0.8 * radius) & (abs(x) <= 0.6 * (y + radius))
    bars = np.minimum(abs(x), abs(y)) <= 0.3 * radius
    return bars & (np.maximum(abs(x), abs(y)) <= radius)


@component
class Shapes(Description):
    """Questions about pictures of shapes; half of them ask for the number of shapes, half for its name.

    Args:
        max_count: the most shapes of a picture.
        train_size, held_out: numbers of training and held-out questions.
        seed: of the pictures.
    """

    name: ClassVar[str] = "shapes"  # of the pictures; others of another name

    max_count: Annotated[int, Field(ge=1, le=CELLS**2)] = 6
    train_size: PositiveInt = 6000
    held_out: PositiveInt = 500
    seed: int = 0

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """The questions of a split, with the columns `prompt`, `images` and `answer`."""
        chosen = np.random.default_rng([self.seed, *f"{self.name}/{split}".encode()])
        rows = []
        for row in range(self.train_size if split == "train" else self.held_out):
            shape, count = SHAPES[chosen.integers(len(SHAPES))], int(chosen.integers(1, self.max_count + 1))
            question, answer = (COUNT, str(count)) if row % 2 else (NAME, shape)
            prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            rows.append({"prompt": prompt, "images": [picture(chosen, count, shape)], "answer": answer})
        return rows


@component
class ShapesPrompts(Shapes, PromptSource):
    """Questions about pictures of shapes for reinforcement learning, with the column `answer` for the reward.

    Args:
        max_prompt_length: the most tokens of a prompt.
    """

    max_prompt_length: PositiveInt = 40

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"answer"})}

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(RLHFDataset, self.rows, context, True, max_prompt_length=self.max_prompt_length)


@component
class ShapesSFT(Shapes, TextSource):
    """Questions about pictures of shapes with their answers, on other pictures than `ShapesPrompts`.

    Args:
        max_length: the most tokens of a text.
    """

    name = "shapes warm start"

    train_size: PositiveInt = 3584
    held_out: PositiveInt = 200
    max_length: PositiveInt = 64

    def build(self, context: BuildContext) -> DataSplits:
        options: dict[str, Any] = {"max_length": self.max_length, "completion_key": "answer"}
        return DataSplits.generated(SFTDataset, self.rows, context, True, **options)
