"""Images of a data set: where they are, the check of all of them before a run, and the fields of a batch.

    row: content parts, column of images ── with_images ──> placeholders, CheckedImage (digest, size)
    rendered chat, sizes ── ImageTokens.expanded ──> token ids       before the run, without the pixels
    rendered chat, pixels ── ImagesOfRows.fields ──> `media.*`         in `collate`, where the batch is used

A picture becomes RGB by one rule: rotated as its EXIF data say; 16 bits scaled to 8; transparent pixels on white;
palettes, grey, CMYK and other modes by Pillow's conversion. Several frames, and 32 bits, are refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import torch
from torch import Tensor

from verl.data.readers import DataRows, RowErrors
from verl.errors import ConfigError, install_command
from verl.models.images import images_of
from verl.protocol.ragged import Ragged

if TYPE_CHECKING:
    from PIL.Image import Image

    from verl.model_paths.images import RowMedia

log = logging.getLogger(__name__)
MAX_BYTES = 2**26  # of a file
MAX_PIXELS = 2**26  # of an image, 8192 x 8192: more are refused before they are decoded
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
THREADS = 8
THUMBNAIL = 64
PLACEHOLDER = {"type": "image"}


class BadImage(ValueError):
    """An image cannot be used; the message says why, without its place."""


@dataclass(frozen=True)
class CheckedImage:
    """An image of a row.

    Attributes:
        source: a file, its content, or an image of Pillow.
        digest: of its content.
        size: width and height as the processor gets it.
    """

    source: Any
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)


def source_of(value: Any, directory: Path) -> Any:
    """The path, the bytes or the image of Pillow that a value of a row means.

    Args:
        value: a path, relative to `directory`; a URL of `file:` or `data:`; bytes; a mapping with `bytes` or `path`, as
            Hugging Face's `Image` feature writes it, or `url`; or an image of Pillow.
    Raises:
        BadImage: it is none of these.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, Path) or (isinstance(value, str) and value):
        text = str(value)
        if text.startswith("data:"):
            head, _, data = text.partition(",")
            if not head.endswith(";base64") or not head.startswith("data:image/"):
                raise BadImage("a data URL that is not data:image/...;base64")
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise BadImage(f"a data URL that is not base64 ({error})") from None
        if "://" in text and not text.startswith("file:"):
            raise BadImage(f"{text[:80]!r} is an address: download the image and name the file")
        return directory / (unquote(urlparse(text).path) if text.startswith("file:") else text)
    if hasattr(value, "tobytes") and hasattr(value, "getexif"):
        return value
    raise BadImage(f"a value of type {type(value).__name__}: expected a path, a URL of file: or data:, or bytes")


def _content(source: Any) -> bytes:
    """The bytes of an image, at most `MAX_BYTES`."""
    if isinstance(source, Path):
        try:
            if not source.is_file():
                raise BadImage(f"{source}: no such file")
            with open(source, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise BadImage(f"{source}: {error.strerror}") from None
    else:
        content = source
    if len(content) > MAX_BYTES:
        raise BadImage(f"more than {MAX_BYTES} bytes")
    return content


def _opened(source: Any) -> tuple[Image, bytes]:
    """An image within the limits, of which only the header was read, and the digest of its content."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"data has images, which need the package pillow: {install_command('PIL')}.") from None
    image, content = source, b""
    if isinstance(source, (Path, bytes)):
        content = _content(source)
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except Image.DecompressionBombError:
            raise BadImage(f"more than {MAX_PIXELS} pixels") from None
        except Exception:  # noqa: BLE001 - a decoder may raise anything
            raise BadImage(f"not an image of the formats {', '.join(FORMATS)}, or damaged") from None
    if image.width * image.height > MAX_PIXELS:
        raise BadImage(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    frames = 1 if image.format == "MPO" else _decode(lambda: getattr(image, "n_frames", 1))  # MPO: of phones
    if frames > 1:
        raise BadImage(f"{frames} frames: expected one")
    if image.mode in ("I", "F"):
        raise BadImage("pixels of 32 bits: expected 8 or 16")
    content = content or repr((image.mode, image.size)).encode() + _decode(image.tobytes)
    return image, hashlib.blake2b(content, digest_size=16).digest()


def _decode(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything
        raise BadImage(f"damaged ({error})") from None


def checked(source: Any, max_pixels: int | None = None) -> CheckedImage:
    """Decode an image once, at reduced size if its format allows that, and keep its digest and size.

    Args:
        max_pixels: see `fitted`.
    Raises:
        BadImage: it cannot be read, or is beyond the limits.
    """
    image, digest = _opened(source)
    width, height = image.size
    image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
    _decode(image.load)
    if _decode(image.getexif).get(0x0112, 1) in (5, 6, 7, 8):  # turned by a quarter, with or without a reflection
        width, height = height, width
    return CheckedImage(source, digest, fitted(width, height, max_pixels))


def fitted(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """Width and height, scaled down to at most `max_pixels`; at least 1 each."""
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    return max(1, int(width * scale)), max(1, int(height * scale))


def decoded(image: CheckedImage) -> Image:
    """An image in RGB, upright, at its size; see the rule above.

    Raises:
        BadImage: its content is no longer that which was checked.
    """
    from PIL import Image, ImageOps

    opened, digest = _opened(image.source)
    if digest != image.digest:
        raise BadImage("it changed since the data set was read")
    picture = _decode(lambda: rgb(ImageOps.exif_transpose(opened)))
    return picture if picture.size == image.size else picture.resize(image.size, Image.Resampling.BICUBIC)


def rgb(image: Image) -> Image:
    """An image in 8 bits of RGB, transparent pixels on white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        import numpy as np

        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def with_images(rows: DataRows, key: str, options: Any, tokenizer: Any, bad: RowErrors) -> DataRows:
    """The usable rows, with a placeholder in the messages for each image, and `DataRows.images` if any row has some.

    Images are in content parts (`{"type": "image", "image": ...}`, or `url`, `path`, `image_url`), or in a column, of
    which each placeholder `{"type": "image"}` takes the next one. If there is no placeholder they are put before the
    text of the first message of the user. Where any row has images, every text prompt becomes such a message.

    Args:
        key: column of the prompt or the messages.
        options: `images_key` and `max_pixels` of a data set.
        bad: receives unusable rows.
    """
    images_key = options.images_key
    chats: dict[int, Any] = {}  # rows with images
    sources: dict[int, list[Any]] = {}
    faults: dict[int, str] = {}
    for index, row in enumerate(rows.values):
        given = _as_list(row.get(images_key)) if images_key is not None else []
        if not given and not _has_images(row.get(key)):
            continue
        try:
            if images_of(tokenizer) is None:
                hint = f", or images_key, which is {images_key!r}, to null" if given else ""
                raise BadImage(f"it has an image, and the model reads none. Set actor.model to one that does{hint}")
            chats[index], values = _extracted(row.get(key), given)
            sources[index] = [named(f"image {n}", source_of, x, rows.directory(index)) for n, x in enumerate(values)]
        except BadImage as error:
            faults[index] = str(error)
    images = [*rows.images]
    distinct, told = {_id(source): source for of_row in sources.values() for source in of_row}, time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        checks = {known: pool.submit(checked, source, options.max_pixels) for known, source in distinct.items()}
        for count, (index, of_row) in enumerate(sources.items(), start=1):
            try:
                images[index] = tuple(named(f"image {n}", checks[_id(x)].result) for n, x in enumerate(of_row))
            except BadImage as error:
                faults[index] = str(error)
            if time.monotonic() > told + 10:
                told = time.monotonic()
                log.info("Checked the images of %d of %d rows.", count, len(sources))
    for index in sorted(faults):
        bad.add(f"{key} at {rows.location(index)}: {faults[index]}")
    if not sources:
        return rows.only([index for index in range(len(rows)) if index not in faults])
    values = []
    for index, row in enumerate(rows.values):
        prompt = chats[index] if index in sources else row.get(key)
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else prompt
        others = {name: x for name, x in row.items() if name not in (images_key, key)}
        values.append(others | ({key: prompt} if key in row else {}))
    return replace(rows, values=values, images=images).only([i for i in range(len(rows)) if i not in faults])


def named(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call; the image has this name in its errors."""
    try:
        return call(*arguments)
    except BadImage as error:
        raise BadImage(f"{name}: {error}") from None


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _has_images(messages: Any) -> bool:
    return isinstance(messages, (list, tuple)) and any(
        _is_image(part) for message in messages if isinstance(message, Mapping) for part in _parts(message)
    )


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else []
    return [{"type": "text", "text": x} if isinstance(x, str) else x for x in texts]


def _extracted(prompt: Any, given: list[Any]) -> tuple[list[Any], list[Any]]:
    """The messages with bare placeholders, and their images in order.

    Raises:
        BadImage: another number of placeholders than of images, or a content part of another type.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
        raise BadImage("images belong to a text or to chat messages")
    if not _has_images(messages):
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None:
            raise BadImage("no message of the user that the images belong to")
        parts = [PLACEHOLDER] * len(given) + _parts(messages[first])
        messages = [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]
    following, images, made = iter(given), [], []
    for message in messages:
        parts = []
        for part in _parts(message):
            if _is_image(part):
                named = [
                    part[name] for name in ("image", "url", "path", "image_url", "bytes") if part.get(name) is not None
                ]
                images.append(named[0] if named else next(following, None))
            elif not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise BadImage(f"a content part of type {kind!r}: expected texts and images")
            parts.append({**PLACEHOLDER} if _is_image(part) else {"type": "text", "text": part["text"]})
        is_list = isinstance(message.get("content"), (list, tuple))
        made.append({**message, "content": parts} if is_list else message)
    lacking, rest = sum(image is None for image in images), len(list(following))
    if lacking or rest:
        raise BadImage(f"{len(images)} placeholders for {len(images) - lacking + rest} images")
    return made, images


def _id(source: Any) -> Any:
    return source if isinstance(source, (Path, bytes)) else id(source)


class ImageTokens:
    """Expands the placeholders of rendered chats, by the sizes of the images alone.

    Args:
        tokenizer: of the model, with its image processor if it has one.
        max_pixels: of images that are `read`.
    """

    def __init__(self, tokenizer: Any, max_pixels: int | None = None):
        self._tokenizer: Any = tokenizer
        self._processor: Any = images_of(tokenizer)
        self._max_pixels = max_pixels
        self._texts: dict[tuple[int, int], str] = {}

    @property
    def token(self) -> int | None:
        """Id of the tokens that stand for features of images."""
        return None if self._processor is None else self._processor.processor.image_token_id

    def read(self, url: str) -> CheckedImage:
        """The image of a data URL.

        Raises:
            BadImage: it is none, beyond the limits, or none that the model reads.
        """
        if self._processor is None:
            raise BadImage("the model reads none")
        if not url.startswith("data:"):
            raise BadImage(f"{url[:80]!r} is not a data URL: send data:image/...;base64,...")
        image = checked(source_of(url, Path()), self._max_pixels)
        self._of_size(image.size)
        return image

    def joined(self, media: RowMedia, images: Sequence[CheckedImage]) -> RowMedia:
        """The digest and the tensors of the images of a row, and of more images behind them."""
        if not images:
            return media
        _, more = self._processor.encode(self._processor.placeholder * len(images), list(map(decoded, images)))
        key, before = media_key([x.digest for x in images], media[0]), media[1]
        return key, more if before is None else {name: torch.cat([before[name], x]) for name, x in more.items()}

    def count(self, text: str) -> int:
        """Placeholders in a rendered chat."""
        return 0 if self._processor is None else text.count(self._processor.placeholder)

    def expanded(self, text: str, images: Sequence[CheckedImage]) -> str:
        """A text with as many placeholders for each image as it has tokens, with the text around them.

        Raises:
            BadImage: another number of placeholders than of images, or a size that the processor refuses.
        """
        if self._processor is None:
            return text
        parts = text.split(self._processor.placeholder)
        if len(parts) != len(images) + 1:
            seen = f"{len(parts) - 1} times {self._processor.placeholder!r} for {len(images)} images"
            raise BadImage(f"the chat has {seen}: the chat template or a text of the row writes it")
        return parts[0] + "".join(self._of_size(x.size) + part for x, part in zip(images, parts[1:], strict=True))

    def _of_size(self, size: tuple[int, int]) -> str:
        if size not in self._texts:
            from PIL import Image

            try:
                ids, _ = self._processor.encode(self._processor.placeholder, [Image.new("RGB", size)])
            except ValueError as error:
                raise BadImage(f"an image of {size[0]} x {size[1]} pixels: {error}") from None
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) != ids:
                raise ConfigError("actor.model: its tokenizer gives other tokens for the text of an image's tokens.")
            self._texts[size] = text
        return self._texts[size]


@dataclass(frozen=True)
class ImagesOfRows:
    """The images of the rows of a data set.

    Attributes:
        images: of each row.
        texts: rendered text of each row, with a placeholder for each image.
        tokenizer: with the image processor of the model.
    """

    images: Sequence[Sequence[CheckedImage]]
    texts: Sequence[str]
    tokenizer: Any

    @classmethod
    def of(cls, images: Sequence[Sequence[CheckedImage]], texts: Sequence[str], tokenizer: Any) -> ImagesOfRows:
        """Texts of rows none of which has an image are not kept."""
        return cls(images, texts if any(images) else (), tokenizer)

    def __bool__(self) -> bool:
        return bool(self.texts)

    @functools.cached_property
    def keys(self) -> Tensor:
        """[N] int64, digest of the images of a row, 0 for none."""
        return torch.tensor([media_key([x.digest for x in row]) for row in self.images])

    def thumbnails(self, row: int) -> list[str]:
        """The images of a row as data URLs of PNG files, at most `THUMBNAIL` pixels wide and high."""
        return [_thumbnail(_decoded((row, image))) for image in self.images[row]]

    def fields(self, rows: Tensor, tokens: Callable[[int], Tensor]) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
        """`media_keys` [B] and the ragged fields `media.*` of a batch; empty if no row of the data set has an image.

        Args:
            rows: [B], indices.
            tokens: of a row, beginning with those of its text, for a check.
        Raises:
            ConfigError: an image changed since it was checked.
        """
        if not self:
            return {}, {}
        chosen, keys = rows.tolist(), {"media_keys": self.keys[rows]}
        wanted = {(x.digest, x.size): (row, x) for row in chosen for x in self.images[row]}
        if not wanted:
            return keys, {}
        with ThreadPoolExecutor(THREADS) as pool:
            pictures = dict(zip(wanted, pool.map(_decoded, wanted.values()), strict=True))
        processor: Any = images_of(self.tokenizer)
        media = {}
        for row in dict.fromkeys(row for row in chosen if self.images[row]):
            of_row = [pictures[x.digest, x.size] for x in self.images[row]]
            ids, media[row] = processor.encode(self.texts[row], of_row)
            assert tokens(row)[: len(ids)].tolist() == ids, "the processor gives other tokens than for the sizes"
        none = {name: x[:0] for name, x in next(iter(media.values())).items()}
        return keys, {f"media.{name}": Ragged.of([media.get(row, none)[name] for row in chosen]) for name in none}


def _decoded(image: tuple[int, CheckedImage]) -> Image:
    row, checked_image = image
    try:
        return decoded(checked_image)
    except BadImage as error:
        named = f" ({checked_image.source})" if isinstance(checked_image.source, Path) else ""
        raise ConfigError(f"data: an image of row {row}{named}: {error}") from None


def thumbnail(url: str) -> str:
    """The image of a data URL, at most `THUMBNAIL` pixels wide and high, as that of a PNG file; empty if damaged."""
    try:
        return _thumbnail(decoded(checked(source_of(url, Path()))))
    except BadImage:
        return ""


def _thumbnail(picture: Image) -> str:
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(content := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def media_key(digests: Sequence[bytes], before: int = 0) -> int:
    """A number for images in their order, behind those of the number `before`; positive, but 0 for none at all."""
    for digest in digests:
        before = max(1, int.from_bytes(hashlib.blake2b(before.to_bytes(8) + digest, digest_size=8).digest()) >> 1)
    return before
