"""Pictures of shapes, made by NumPy, and questions about them: how many there are, and which shape it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

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


def questions(name: str, count: int, max_count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with the columns `prompt`, `images` and `answer`; half of them ask for the number of shapes, half for its
    name.

    Args:
        name: of the rows; others differ.
        count: number of rows.
        max_count: the most shapes of a picture.
        seed: of the pictures.
    """
    chosen = np.random.default_rng([seed, *name.encode()])
    for row in range(count):
        shape, number = SHAPES[chosen.integers(len(SHAPES))], int(chosen.integers(1, max_count + 1))
        question, answer = (COUNT, str(number)) if row % 2 else (NAME, shape)
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = [{"role": "user", "content": parts}]
        yield {"prompt": prompt, "images": [picture(chosen, number, shape)], "answer": answer}


@component
class ShapesPrompts(PromptSource):
    """Questions about pictures of shapes, with the column `answer`.

    Args:
        max_count: the most shapes of a picture.
        train_size, held_out: numbers of training and evaluation questions.
        seed: of the pictures.
        max_prompt_length: the most tokens of a prompt.
    """

    max_count: Annotated[int, Field(ge=1, le=CELLS**2)] = 6
    train_size: PositiveInt = 6000
    held_out: PositiveInt = 500
    seed: int = 0
    max_prompt_length: PositiveInt = 40

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"answer"})}

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """The questions of a split."""
        count = self.train_size if split == "train" else self.held_out
        return list(questions(f"shapes/{split}", count, self.max_count, self.seed))

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(RLHFDataset, self.rows, context, True, max_prompt_length=self.max_prompt_length)


@component
class ShapesSFT(TextSource, Description):
    """Questions about pictures of shapes with their answers, on other pictures than `ShapesPrompts`.

    Args:
        max_count: the most shapes of a picture.
        train_size, held_out: numbers of questions.
        seed: of the pictures.
        max_length: the most tokens of a text.
    """

    max_count: Annotated[int, Field(ge=1, le=CELLS**2)] = 6
    train_size: PositiveInt = 3584
    held_out: PositiveInt = 200
    seed: int = 0
    max_length: PositiveInt = 64

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """Texts of a split, each a prompt and a completion without its EOS."""
        count = self.train_size if split == "train" else self.held_out
        rows = questions(f"shapes warm start/{split}", count, self.max_count, self.seed)
        return [{**row, "completion": row["answer"]} for row in rows]

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(SFTDataset, self.rows, context, True, max_length=self.max_length)
