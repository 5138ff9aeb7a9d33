"""Image-text models: the processor of their images, and their vision tower.

rendered chat, images ── ImageProcessor.encode ──> token ids with placeholders, tensors of the images
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.models.structure import unwrapped

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # made again from the ids of a row
PIXELS, GRIDS = "pixel_values", "image_grid_thw"  # keywords of models
VISION = "vision"  # the name of the vision tower in `freeze`


def is_image_text(config: Any) -> bool:
    """Whether a configuration is that of an image-text model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return config.model_type in NAMES and getattr(config, "vision_config", None) is not None


def vision_tower(model: Any) -> nn.Module | None:
    """The module of a Hugging Face model that sees images; None in a text model."""
    base = unwrapped(model)
    vision: Any = getattr(base.config, "vision_config", None)
    kind = getattr(vision, "model_type", None)
    towers = (x for x in base.modules() if getattr(getattr(x, "config", None), "model_type", None) == kind)
    return None if vision is None else next(towers, None)


def freeze(model: Any, names: Sequence[str] | None, path: str) -> None:
    """Leave parts of a model out of training.

    Args:
        names: of modules, each the end of the path of a module, such as blocks.0, or `vision` for the vision
            tower; None for that of an image-text model.
        path: configuration path of the model, for messages.
    Raises:
        ConfigError: a name matches nothing, or nothing is left to train.
    """
    tower = vision_tower(model)
    for name in ((VISION,) if tower is not None else ()) if names is None else names:
        chosen = [tower] if name == VISION and tower is not None else []
        chosen += [x for at, x in model.named_modules() if f".{at}.".endswith(f".{name}.")]
        if not chosen:
            raise ConfigError(
                f"{path}.freeze has {name!r}, which matches no module of a {type(unwrapped(model)).__name__}. Name "
                f"modules by their path, such as {next(at for at, _ in model.named_children())}."
            )
        for module in chosen:
            module.requires_grad_(False)
    if names and not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{path}.freeze is {list(names)}: nothing is left to train.")


class ImageCounts:
    """Numbers of tokens of images, by the configuration of an image-text model.

    Attributes:
        per_image: tokens of each image, or of each tile of one; None where they depend on its size.
        patches: that make a token; 0 if nothing is known of the model's images.
    """

    def __init__(self, config: Any):
        vision: Any = getattr(config, "vision_config", None)
        scale, per_image = (getattr(config, name, None) for name in ("scale_factor", "mm_tokens_per_image"))
        self.per_image: int | None = per_image
        self.patches: int = (scale or getattr(vision, "spatial_merge_size", None) or 0) ** 2
        if vision is not None and (scale or per_image):
            whole = (vision.image_size // vision.patch_size) ** 2
            self.per_image = per_image or whole // self.patches
            self.patches = whole // self.per_image

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """Placeholders of each image of some items, [images]."""
        if self.per_image is None:
            return values[GRIDS].prod(dim=1) // self.patches
        import torch

        return torch.full((len(values[PIXELS]),), self.per_image)


class ImageProcessor:
    """Turns images, and texts with placeholders, into what an image-text model reads; all rules are those of
    transformers.

    Args:
        processor_class: name of the processor of the family in transformers.
        image_processor: of transformers.
        tokenizer: of the model.
        files: content of the files that describe it, by name; saved beside the weights.
        options: further arguments of the processor, such as the number of tokens of an image.
    """

    def __init__(
        self,
        processor_class: str,
        image_processor: Any,
        tokenizer: Any,
        files: Mapping[str, bytes],
        options: Mapping[str, Any] | None = None,
    ):
        self.processor_class, self.image_processor, self.files = processor_class, image_processor, dict(files)
        self.tokenizer, self.options = tokenizer, dict(options or {})

    @classmethod
    def of(cls, directory: Path, tokenizer: Any) -> ImageProcessor | None:
        """The processor that the files of a model describe; None without such files.

        Raises:
            ConfigError: transformers cannot make it.
        """
        files = {name: (directory / name).read_bytes() for name in PROCESSOR_FILES if (directory / name).is_file()}
        if not {*PROCESSOR_FILES[:2]} & files.keys():
            return None
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.models.auto import processing_auto

        whole = json.loads(files.get(PROCESSOR_FILES[0], b"{}"))
        images = json.loads(files.get(PROCESSOR_FILES[1], b"{}")) or whole.get("image_processor", {})
        names: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
        kind = AutoConfig.from_pretrained(directory).model_type
        name: Any = whole.get("processor_class") or images.get("processor_class") or names.get(kind)
        try:
            image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        except Exception as error:
            raise ConfigError(f"{directory} has an image processor that cannot be loaded: {error}") from error
        options = {key: x for key, x in whole.items() if not isinstance(x, dict) and key != "processor_class"}
        return cls(name, image_processor, tokenizer, files, options)

    @functools.cached_property
    def processor(self) -> Any:
        """The processor of transformers, without the one of videos, which would need torchvision.

        Raises:
            ConfigError: a package is missing.
        """
        import inspect

        import transformers

        kind: Any = getattr(transformers, self.processor_class)
        kind = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        taken = inspect.signature(kind.__init__).parameters
        given = {"image_processor": self.image_processor, "tokenizer": self.tokenizer, "video_processor": None}
        given |= {"chat_template": getattr(self.tokenizer, "chat_template", None), **self.options}
        try:
            return kind(**{name: x for name, x in given.items() if name in taken})
        except ImportError as error:
            raise ConfigError(f"{kind.__name__}: {error}") from error

    def save(self, directory: Path) -> None:
        """Write the files that describe it."""
        for name, content in self.files.items():
            (directory / name).write_bytes(content)

    @property
    def placeholder(self) -> str:
        """The text that stands in a rendered chat for each image."""
        return self.processor.image_token

    def encode(self, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Tensor]]:
        """Token ids of a text with its placeholders expanded, and the tensors of its images, [n ...] each.

        Args:
            text: with one `placeholder` for each image.
        Raises:
            ValueError: another number of placeholders, or an image that transformers cannot process.
        """
        if (found := text.count(self.placeholder)) != len(images):
            raise ValueError(f"{found} placeholders {self.placeholder!r} for {len(images)} images")
        if not images:
            return self.tokenizer(text, add_special_tokens=False).input_ids, {}
        out = self.processor(text=[text], images=[list(images)], return_tensors="pt", add_special_tokens=False)
        media = {name: x for name, x in out.items() if name not in OF_TOKENS}
        nested = media["pixel_values"].ndim == 5  # rows, images, ...: each image as a row of one
        return out["input_ids"][0].tolist(), {name: x[0][:, None] if nested else x for name, x in media.items()}


def save_tokenizer(tokenizer: Any, directory: str | Path) -> None:
    """Write the files of a tokenizer, if there is one, and those of the image processor of its model."""
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
        if isinstance(images := images_of(tokenizer), ImageProcessor):
            images.save(Path(directory))


def images_of(tokenizer: Any) -> ImageProcessor | None:
    """The image processor of the model that a tokenizer was loaded with; None if it reads no images."""
    return vars(tokenizer).get("image_processor")
