"""Images of data sets: where they are found, what they become, and what is refused before a run."""

import base64
import io
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_models import FAMILIES, PLACEHOLDERS, picture, reader
from PIL import Image
from refusals import refusal, refused

from verl.component import BuildContext
from verl.data import images
from verl.data.base import PreferenceOptions
from verl.data.hub import HubPrompts
from verl.data.images import checked, decoded, rgb
from verl.data.preference_dataset import PreferenceDataset
from verl.data.readers import RowErrors
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.models.images import images_of
from verl.models.tiny import character_tokenizer


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": x} if isinstance(x, str) else x for x in parts]}]


PLACE = {"type": "image"}
LONG = {"max_prompt_length": 2000}


def chat_rows(directory: Path) -> list[dict[str, Any]]:
    """Two images, none, one, one of another size and the same one again."""
    (directory / "dir").mkdir(exist_ok=True)
    for name, image in {"a": picture(0), "b": picture(1, 40, 20), "dir/c": picture(2, 9, 33)}.items():
        image.save(directory / f"{name}.png")
    return [
        {"prompt": user(PLACE, "and", PLACE, "?"), "images": ["a.png", "b.png"], "answer": "1"},
        {"prompt": "no picture", "images": [], "answer": "2"},
        {"prompt": user({"type": "image", "path": "dir/c.png"}, "one"), "answer": "3"},
        {"prompt": "a text", "images": ["b.png"], "answer": "4"},
        {"prompt": user(PLACE, "and", PLACE, "?"), "images": ["b.png", "a.png"], "answer": "5"},
    ]


def written(directory: Path, rows: list[dict[str, Any]]) -> Path:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_tokens_and_tensors_of_the_processor_of_transformers(family, tmp_path):
    tokenizer = reader(family)
    processor: Any = images_of(tokenizer)
    data = RLHFDataset(written(tmp_path, chat_rows(tmp_path)), tokenizer, LONG)
    assert data.has_images
    batch = data.collate([3, 1, 0, 2, 3])
    place, two = PLACEHOLDERS[family], "<user>{0}and{0}?<eos><assistant>"
    texts = [f"<user>{place}a text<eos><assistant>", "", two.format(place), f"<user>{place}one<eos><assistant>"]
    named = [["b.png"], [], ["a.png", "b.png"], ["dir/c.png"]]
    for row, (text, names) in enumerate(zip(texts, named)):
        tokens = batch["prompts"][row][batch["prompt_mask"][row]].tolist()
        if not names:
            assert [len(field[row]) for field in batch.ragged.values()] == [0] * len(batch.ragged)
            continue
        ids, media = processor.encode(text, [Image.open(tmp_path / name).convert("RGB") for name in names])
        assert tokens == ids
        assert {f"media.{name}" for name in media} == batch.ragged.keys()
        assert all(torch.equal(batch[f"media.{name}"][row], x) for name, x in media.items())
    keys = batch["media_keys"].tolist()
    assert keys[1] == 0 < min(keys[0], *keys[2:])
    assert keys[0] == keys[4] != keys[2]
    assert len(batch["media.pixel_values"].offsets) == 5  # the two equal rows share theirs
    assert batch["prompt_text"].tolist() == [texts[0], "<user>no picture<eos><assistant>", *texts[2:], texts[0]]
    assert batch["prompt_messages"][2] == user(PLACE, "and", PLACE, "?")
    assert "images" not in batch
    assert "answer" in batch
    small = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in data.pictures(0)]
    assert [image.tobytes() for image in small] == [picture(0).tobytes(), picture(1, 40, 20).tobytes()]
    assert data.pictures(1) == []
    assert not data.collate([1]).ragged
    assert data.collate([1])["media_keys"].tolist() == [0]


def test_rows_of_equal_tokens_and_other_images_are_no_duplicates(tmp_path):
    data = RLHFDataset(written(tmp_path, chat_rows(tmp_path)), reader("gemma3"), LONG)
    assert data.tokens[0].tolist() == data.tokens[4].tolist()
    assert len(set(data.digests)) == 5
    assert data.collate([0])["media_keys"] != data.collate([4])["media_keys"]


def forms(directory: Path) -> dict[str, Any]:
    """One image in each form that a row may name it in."""
    content = encoded(picture(0))
    (directory / "a b.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    return {
        "path": "a b.png",
        "absolute path": str(directory / "a b.png"),
        "file URL": f"file://{directory}/a%20b.png",
        "data URL": url,
        "Hugging Face": {"bytes": content, "path": "elsewhere.png"},
        "Hugging Face, on disk": {"bytes": None, "path": "a b.png"},
        "OpenAI": {"url": url},
        "bytes": content,
        "Pillow": Image.open(io.BytesIO(content)),
    }


@pytest.mark.parametrize("form", range(9))
def test_every_form_of_an_image_gives_the_same_tensors(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = list(forms(tmp_path).values())[form]
    of_column = {"prompt": "what?", "images": [value]}
    in_parts = {"prompt": user({"type": "image", "image": value}, "what?")}
    expected = RLHFDataset.from_rows([{"prompt": "what?", "images": [picture(0)]}], reader(), LONG).collate([0])
    for row in (of_column, {**of_column, "images": value}, in_parts):
        found = RLHFDataset.from_rows([row], reader(), LONG).collate([0])
        assert torch.equal(found["prompts"], expected["prompts"])
        assert torch.equal(found["media.pixel_values"][0], expected["media.pixel_values"][0])


def test_bytes_of_parquet_and_a_part_with_an_image_url_are_read(tmp_path):
    content, file = encoded(picture(0)), tmp_path / "rows.parquet"
    url = {"url": "data:image/png;base64," + base64.b64encode(content).decode()}
    rows = [{"prompt": "what?", "images": [{"bytes": content, "path": None}]}, {"prompt": "none", "images": []}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    row = {"prompt": user({"type": "image_url", "image_url": url}, "what?")}
    one, other = RLHFDataset(file, reader(), LONG), RLHFDataset.from_rows([row], reader(), LONG)
    one, other = one.collate([0]), other.collate([0])
    assert torch.equal(one["media.pixel_values"][0], other["media.pixel_values"][0])
    assert one["media_keys"] == other["media_keys"]


# What a picture becomes


def test_every_mode_becomes_rgb_by_the_written_rule():
    grey16 = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
    half = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([10, 20, 30])
    clear = palette.copy()
    clear.info["transparency"] = 0
    for image, pixels in [
        (grey16, [(0,) * 3, (1,) * 3, (255,) * 3]),
        (half, [(255, 255, 255)]),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 255)), [(255, 0, 0)]),
        (Image.new("LA", (1, 1), (0, 0)), [(255, 255, 255)]),
        (Image.new("L", (1, 1), 7), [(7, 7, 7)]),
        (Image.new("1", (1, 1), 1), [(255, 255, 255)]),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), [(255, 0, 0)]),
        (palette, [(10, 20, 30)]),
        (clear, [(255, 255, 255)]),
    ]:
        made = rgb(image)
        assert made.mode == "RGB"
        assert [made.getpixel((x, 0)) for x in range(made.width)] == pixels, image.mode


def test_the_rotation_of_a_camera_is_applied_before_the_size_is_measured():
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(3, 40, 24)
    lying = encoded(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    found = checked(lying)
    assert found.size == (40, 24)
    assert decoded(found).tobytes() == upright.tobytes()


def test_a_jpeg_of_a_phone_with_a_preview_is_its_first_picture():
    mpo = encoded(picture(0, 64, 32), "MPO", save_all=True, append_images=[picture(1, 8, 8)])
    assert decoded(checked(mpo)).size == (64, 32)


def test_larger_pictures_are_scaled_down_and_have_fewer_tokens():
    rows = [{"prompt": "what?", "images": [picture(0, 60, 30)]}]
    lengths = [RLHFDataset.from_rows(rows, reader(), {**LONG, "max_pixels": x}).longest for x in (None, 10**6, 300)]
    assert lengths[0] == lengths[1] > lengths[2]
    assert checked(picture(0, 60, 30), 200).size == (20, 10)


def test_an_image_that_changes_after_the_check_is_refused(tmp_path):
    picture(0).save(tmp_path / "a.png")
    data = RLHFDataset(written(tmp_path, [{"prompt": "what?", "images": ["a.png"]}]), reader(), LONG)
    picture(1).save(tmp_path / "a.png")
    with refusal("data", value="a.png"):
        data.collate([0])


# Sequences to learn, and preferences


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_learned_on_the_turns_of_the_assistant_beside_its_images(family, tmp_path):
    picture(0).save(tmp_path / "a.png")
    turns = [*user(PLACE, "one?"), {"role": "assistant", "content": "yes"}]
    turns += [*user("and", PLACE), {"role": "assistant", "content": "no"}]
    row = {"messages": turns, "images": ["a.png", "a.png"]}
    options = {"messages_key": "messages", "max_length": 2000}
    tokenizer = reader(family)
    batch = SFTDataset(written(tmp_path, [row]), tokenizer, options).collate([0, 0])
    place = PLACEHOLDERS[family]
    text = f"<user>{place}one?<eos><assistant>yes<eos><user>and{place}<eos><assistant>no<eos>"
    processor: Any = images_of(tokenizer)
    ids, media = processor.encode(text, [picture(0)] * 2)
    assert batch["input_ids"][0].tolist() == ids
    assert tokenizer.decode(batch["input_ids"][0][batch["loss_mask"][0]]) == "yes<eos>no<eos>"
    assert all(torch.equal(batch[f"media.{name}"][1], x) for name, x in media.items())
    assert batch["media_keys"].unique().numel() == 1


def test_prompts_with_completions_and_preferences_have_the_images_of_their_prompt(tmp_path):
    row = {"prompt": "how many?", "images": [picture(0)]}
    tokenizer = reader()
    prompt = RLHFDataset.from_rows([row], tokenizer, LONG).collate([0])
    learned = SFTDataset.from_rows([{**row, "completion": "3"}], tokenizer, {"max_length": 2000}).collate([0])
    assert learned["input_ids"][0].tolist()[: prompt["prompts"].shape[1]] == prompt["prompts"][0].tolist()
    pairs = [{**row, "chosen": "3", "rejected": "4"}, {"prompt": "2?", "chosen": "2", "rejected": "1"}]
    options = PreferenceOptions(max_prompt_length=2000, max_length=2000)
    preferences = PreferenceDataset.from_rows(pairs, tokenizer, options, RowErrors())
    batch = preferences.collate([1, 0])
    found = prompt["media_keys"].tolist()
    assert batch["media_keys"].tolist() == [0, *found, 0, *found]
    for rows in (learned, batch[1:2], batch[3:4], preferences.unpaired().collate([1])):
        assert torch.equal(rows["media.pixel_values"][0], prompt["media.pixel_values"][0])
        assert rows["media_keys"].tolist()[:1] == found


# Refused before a run


def load(*given: Any, family: str | None = "qwen2_5_vl", prompt: Any = "what?", **options: Any) -> RLHFDataset:
    tokenizer = character_tokenizer() if family is None else reader(family)
    row = {"prompt": prompt, "images": list(given)} if given else {"prompt": prompt}
    return RLHFDataset.from_rows([{"prompt": "a text"}, row], tokenizer, {**LONG, **options})


def cut(image: bytes) -> bytes:
    return image[: len(image) * 2 // 3]


def frames(kind: str) -> bytes:
    return encoded(picture(0), kind, save_all=True, append_images=[picture(1)])


def header(width: int, height: int) -> bytes:
    """A PNG that claims to be of this size."""
    whole = bytearray(encoded(Image.new("1", (1, 1))))
    whole[16:24] = width.to_bytes(4) + height.to_bytes(4)
    import zlib

    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4)
    return bytes(whole)


def of_file(tmp_path: Path, name: str = "x.png") -> RLHFDataset:
    return RLHFDataset(written(tmp_path, [{"prompt": "a"}, {"prompt": "b", "images": [name]}]), reader(), LONG)


def fifo(tmp_path: Path) -> RLHFDataset:
    os.mkfifo(tmp_path / "x.png")
    return of_file(tmp_path)


PHOTO = encoded(picture(0, 200, 200), "JPEG")
test_what_is_no_image_of_a_row_is_refused_in_one_sentence_with_row_and_reason = refused(
    ("prompt", "no such file", lambda tmp_path: of_file(tmp_path)),
    ("prompt", "truncated", lambda: load(cut(encoded(picture(0))))),
    ("prompt", "damaged", lambda: load(cut(PHOTO))),
    ("prompt", "formats", lambda: load(b"no image")),
    ("prompt", "formats", lambda: load(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")),
    ("prompt", images.MAX_PIXELS, lambda: load(header(20_000, 20_000))),
    ("prompt", images.MAX_PIXELS, lambda: load(header(9_000, 9_000))),
    ("prompt", images.MAX_BYTES, lambda: load(bytes(images.MAX_BYTES + 1))),
    ("prompt", "2 frames", lambda: load(frames("GIF"))),
    ("prompt", "2 frames", lambda: load(frames("WEBP"))),
    ("prompt", "32 bits", lambda: load(encoded(Image.new("F", (4, 4)), "TIFF"))),
    ("prompt", "address", lambda: load("https://example.org/x.png")),
    ("prompt", "base64", lambda: load("data:image/png;base64,?")),
    ("prompt", "data URL", lambda: load("data:text/plain,abc")),
    ("prompt", "int", lambda: load(5)),
    ("prompt", "1 placeholders for 2 images", lambda: load(picture(0), picture(0), prompt=user(PLACE))),
    ("prompt", "2 placeholders for 1 images", lambda: load(picture(0), prompt=user(PLACE, PLACE))),
    ("prompt", "1 placeholders for 0 images", lambda: load(prompt=user(PLACE))),
    ("prompt", "audio", lambda: load(picture(0), prompt=user(PLACE, {"type": "audio"}))),
    ("prompt", "user", lambda: load(picture(0), prompt=[{"role": "system", "content": "a"}])),
    ("prompt", "images_key", lambda: load(picture(0), family=None)),
    ("prompt", "actor.model", lambda: load(prompt=user(PLACE), family=None)),
    ("prompt", "2 times", lambda: load(picture(0), family="idefics3", prompt=user(PLACE, "<image>"))),
    ("prompt", "1 times", lambda: load(family="idefics3", prompt="what is <image>?")),
    ("prompt", "1 x 900", lambda: load(picture(0, 1, 900))),
    ("prompt", "no such file", fifo),
    ("truncation", "left", lambda: load(picture(0), max_prompt_length=12, truncation="left")),
)  # fmt: skip


def test_a_picture_of_one_pixel_is_read():
    assert load(encoded(picture(0, 1, 1))).collate([1])["media.pixel_values"].lengths.min() > 0


def test_a_row_with_a_broken_image_may_be_skipped(caplog):
    rows = [{"prompt": "a", "images": [picture(0)]}, {"prompt": "b", "images": [b"no"]}, {"prompt": "c"}]
    data = RLHFDataset.from_rows(rows, reader(), {**LONG, "on_bad_row": "skip"})
    assert [data[row]["prompt_ids"] for row in range(len(data))] == [0, 2]
    assert "prompt at row 1: image 0: not an image" in caplog.text
    assert data.collate([0, 1])["media.pixel_values"].lengths.tolist()[1] == 0


def test_a_column_of_images_may_be_left_alone():
    data = RLHFDataset.from_rows([{"prompt": "a", "images": ["x.png"]}], character_tokenizer(), {"images_key": None})
    assert not data.has_images
    assert data.collate([0])["images"].tolist() == [["x.png"]]


def test_text_alone_of_an_image_model_is_rendered_in_parts_and_content_may_be_absent_beside_calls():
    only_parts = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    only_parts += "{% if m.tool_calls %}!{% endif %}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [
        {
            "prompt": [
                {"role": "user", "content": "a"},
                call,
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
            ]
        }
    ]
    data = RLHFDataset.from_rows(rows, reader(), {"chat_template": only_parts})
    assert data.collate([0])["prompt_text"].tolist() == ["a!b"]
    assert not data.has_images


def test_images_of_a_local_data_set_lie_beside_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    picture(0).save(tmp_path / "data/a.png")
    (tmp_path / "data/train.jsonl").write_text(
        '{"question": "how many?", "images": ["a.png"], "answer": "3", "other": 1}\n'
    )
    options = {"prompt": "question", "answer": "answer", "keep_columns": (), "max_prompt_length": 2000}
    splits = HubPrompts(dataset=str(tmp_path), **options).build(BuildContext(tokenizer=reader()))
    assert splits.has_images
    assert splits.train.collate([0])["media.pixel_values"].lengths.min() > 0


def test_whatever_damaged_files_are_they_are_read_to_the_end_or_refused():
    """What the check accepts is decoded in `collate` without an error, at the size that the check gave."""
    random, read = Random(0), 0
    files = [encoded(picture(0, 40, 30), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")]
    for _ in range(600):
        content = bytearray(random.choice(files))
        if random.random() < 0.3:
            del content[random.randrange(len(content)) :]
        for _ in range(random.randrange(4) if content else 0):
            content[random.randrange(len(content))] = random.randrange(256)
        try:
            found = checked(bytes(content))
        except images.BadImage:
            continue
        assert decoded(found).size == found.size
        read += 1
    assert 60 < read < 540
