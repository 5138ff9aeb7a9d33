"""Images in observations and in results of tools: each turn sees all that its episode has shown so far."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.episodes import Scripted, engine_of
from environments.test_journal import Counting, Killed, Recovering, kill_while_writing, same
from image_models import picture, save_image_model
from model_paths.test_images import plain_log_probs, plain_model
from PIL import Image
from refusals import refusal

from verl.component import BuildContext
from verl.data.images import ImageTokens
from verl.data.rlhf_dataset import RLHFDataset
from verl.environments.base import Action, StepResult
from verl.environments.hosted import FunctionEnvironment, PythonTools
from verl.environments.hosts.host_main import BadAnswer, as_observation
from verl.environments.journal import EpisodeJournal
from verl.environments.tool_calls import ToolCall
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import RolloutError
from verl.model_paths.images import KEYS
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest

FAMILIES = ("qwen2_5_vl", "idefics3", pytest.param("gemma3", marks=pytest.mark.slow))
LETTERS = tuple(range(4, 108))  # end a turn, special tokens do not
CONTENT = {"role": "user", "content": "how many?"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    made: dict[str, Path] = {}

    def of(family: str) -> Pretrained:
        if family not in made:
            made[family] = save_image_model(tmp_path_factory.mktemp(family) / "model", family)
        return Pretrained(path=str(made[family]), dtype="float64", images=True, freeze=())

    return of


def prompts_of(tokenizer: Any, images: list[list[int]]) -> DataProto:
    """Prompts of equal text with images of these seeds."""
    rows = [{"prompt": [CONTENT], "images": list(map(picture, seeds))} for seeds in images]
    batch = RLHFDataset.from_rows(rows, tokenizer, {"max_prompt_length": 400}).collate(range(len(rows)))
    return batch.union(DataProto.from_dict({"group_ids": torch.arange(len(rows))}))


def shows(number: int, size: tuple[int, int] = (24, 16)) -> list[dict[str, Any]]:
    parts = ["look: ", {"type": "image", "image": picture(number, *size)}, {"type": "text", "text": "and now?"}]
    return [{"role": "user", "content": parts}]


def played(
    net: Any, tokenizer: Any, prompts: DataProto, answer: Any, samples: int = 3, greedy: bool = False
) -> DataProto:
    environment = Scripted(answer=answer, images=True, max_tokens=200)
    with contextlib.closing(engine_of(environment, model=(net, tokenizer), stop_token_ids=LETTERS)) as engine:
        return engine.generate(prompts, GenerationRequest(0, samples, greedy))


def compared(path: str, rows: DataProto, log_probs: torch.Tensor) -> int:
    """Compare log-probs [B T] with a plain forward pass of each row; returns how many rows could be compared."""
    model, count = plain_model(Path(path)), 0
    for row in range(len(rows)):
        mask = rows["response_mask"][row]
        if not bool((rows["responses"][row][mask] == model.config.image_token_id).any()):  # refused by transformers
            length = int(rows["attention_mask"][row, rows["prompts"].shape[1] :].sum())
            plain = plain_log_probs(model, rows, row)[:length][mask[:length]]
            assert (log_probs[row][mask] - plain).abs().max() < 1e-9, row
            count += 1
    return count


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_each_turn_are_those_of_a_plain_forward_pass_with_all_images_so_far(family, saved):
    source, counter = saved(family), iter(range(10, 1000))

    def answer(row, turn, action):  # each sample sees other images of one size, so that tokens may be equal
        return StepResult(shows(next(counter)) if turn != 2 else "no image", 1.0, terminated=turn >= 4)

    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    for images in ([[1], [2], []], [[], [], []]):
        rows = played(net, tokenizer, prompts_of(tokenizer, images), answer)
        assert len({*rows[KEYS].tolist()}) == len(rows) == 9
        assert compared(source.path, rows, rows["rollout_log_probs"]) > 4
        assert max(len(record["turns"]) for record in rows["episode"]) == 4
    small = rows["episode"][0]["turns"][0]["observation"][0]["content"][1]["image"]
    assert small.startswith("data:image/png;base64,")


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_equal_tokens_and_other_images_are_drawn_each_with_its_own(family, saved):
    source, counter = saved(family), iter(range(10, 1000))

    def answer(row, turn, action):
        return StepResult(shows(next(counter)), terminated=turn >= 2)

    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    rows = played(net, tokenizer, prompts_of(tokenizer, [[1], []]), answer, samples=3, greedy=True)
    for prompt in (rows[:3], rows[3:]):
        first = [int(is_second_turn.nonzero()[0]) for is_second_turn in prompt["turn_ids"] == 1]
        assert len({tuple(x[:at].tolist()) for x, at in zip(prompt["responses"], first, strict=True)}) == 1
        assert len({float(x[at]) for x, at in zip(prompt["rollout_log_probs"], first, strict=True)}) == 3
    assert compared(source.path, rows, rows["rollout_log_probs"]) > 3


@pytest.mark.slow
def test_an_image_after_a_placeholder_that_the_policy_has_written_ends_the_episode(saved, monkeypatch):
    source = saved("qwen2_5_vl")
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    prompts = prompts_of(tokenizer, [[1], [2]])

    def answer(row, turn, action):
        return StepResult(shows(turn) if turn < 3 else "no image", 1.0, terminated=turn > 5)

    rows = played(net, tokenizer, prompts, answer)
    written = int(rows["responses"][0, 0])
    monkeypatch.setattr(ImageTokens, "token", written)
    for before, after in zip(rows["episode"], played(net, tokenizer, prompts, answer)["episode"], strict=True):
        texts = [turn["text"] for turn in before["turns"]]
        assert [turn["text"] for turn in after["turns"]] == texts[: len(after["turns"])]
        assert (after["end"] == "truncated") == (len(after["turns"]) < len(texts))
    assert any(record["end"] == "truncated" for record in played(net, tokenizer, prompts, answer)["episode"])


def test_an_image_where_none_was_announced_stops_the_run(saved):
    source = saved("qwen2_5_vl")
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    environment = Scripted(answer=lambda *_: StepResult(shows(1)))
    engine = engine_of(environment, model=(net, tokenizer), stop_token_ids=LETTERS)
    with contextlib.closing(engine), refusal("environment.images", kind=RolloutError):
        engine.generate(prompts_of(tokenizer, [[1]]), GenerationRequest(0, 1))


def test_an_interrupted_run_continues_with_the_images_of_its_journal(saved, tmp_path):
    source = saved("qwen2_5_vl")
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()

    class Showing(Counting):
        def __call__(self, row, turn, action):
            found = super().__call__(row, turn, action)
            return StepResult(shows(sum(map(ord, action.text)) % 50), found.reward)

    def life(directory: Path, answer: Showing) -> DataProto:
        environment = Recovering(answer=answer, images=True, max_tokens=200, max_turns=3)
        engine = engine_of(environment, model=(net, tokenizer), stop_token_ids=LETTERS)
        engine.journal = EpisodeJournal(directory / "episode_journal", "the same in every life", 0)
        kill_while_writing(engine.journal, answer.kill_after)
        with contextlib.closing(engine):
            return engine.generate(prompts_of(tokenizer, [[1], [2]]), GenerationRequest(0, 2))

    whole = life(tmp_path / "whole", Showing())
    with pytest.raises(Killed):
        life(tmp_path / "cut", Showing(9))
    rows = life(tmp_path / "cut", last := Showing())
    assert same(rows, whole)
    assert rows[KEYS].tolist() == whole[KEYS].tolist()
    reused = sum(episode["journal"]["reused"] for episode in rows["episode"])
    assert reused > 3
    assert len(last.asked) + reused == sum(len(record["calls"]) - 1 for record in whole["episode"])


def test_an_answer_of_the_journal_is_that_to_the_same_images(saved, tmp_path):
    """Prompts of equal tokens: the reset of an episode is found again, and repeated, for the same image alone."""
    source = saved("qwen2_5_vl")
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    found = []
    for seed in (1, 2, 1):
        environment = Recovering(answer=Counting(), max_tokens=60, max_turns=2)
        engine = engine_of(environment, model=(net, tokenizer), stop_token_ids=LETTERS)
        engine.journal = EpisodeJournal(tmp_path / "episode_journal", "the same in every life", 0)
        with contextlib.closing(engine):
            rows = engine.generate(prompts_of(tokenizer, [[seed]]), GenerationRequest(0, 1))
        found.append(rows["episode"][0]["journal"]["replayed"])
    assert found == [0, 0, 1]


def zoom(number: int) -> list:
    """Gives a picture."""
    return ["here: ", picture(number)]


def test_results_of_tools_are_texts_and_images():
    step = asyncio.run(
        ToolEnvironment({"zoom": Tool.of(zoom)}, 5.0).step(Action("", (ToolCall("zoom", {"number": 3}),)))
    )
    (message,) = as_observation(step.observation, "step")
    assert message["content"] == as_observation([{"role": "tool", "content": zoom(3)}], "step")[0]["content"]
    assert [part["type"] for part in message["content"]] == ["text", "image"]


IN_ANOTHER_PROCESS = """
from PIL import Image

def zoom(number: int):
    return ["here: ", Image.new("RGB", (8, 8), (number, 0, 0))]

class World:
    def reset(self, row, seed):
        return [{"role": "user", "content": zoom(3)}]

    def step(self, action):
        return self.reset({}, 0), 0.0, False, False, {}
"""


@pytest.mark.slow
def test_images_of_another_process_come_as_data_urls(tmp_path):
    (tmp_path / "world.py").write_text(IN_ANOTHER_PROCESS)

    async def contents() -> list[Any]:
        tools = PythonTools(path=f"{tmp_path}/world.py").factory(BuildContext())
        world = FunctionEnvironment(path=f"{tmp_path}/world.py:World").factory(BuildContext())
        for pool in (tools, world):
            await pool.start()
        try:
            environment, called = world.make(), tools.make()
            await environment.acquire_process()
            await called.reset({"prompt_messages": []}, 0)
            opening = await environment.reset({"prompt_text": ""}, 0)
            result = await called.step(Action("", (ToolCall("zoom", {"number": 3}),)))
            return [opening[0]["content"], result.observation[0]["content"]]
        finally:
            for pool in (tools, world):
                await pool.stop()

    picture_of_red = Image.new("RGB", (8, 8), (3, 0, 0))
    expected = as_observation([{"role": "user", "content": ["here: ", picture_of_red]}], "step")[0]["content"]
    assert asyncio.run(contents()) == [expected, expected]


def test_what_is_no_image_is_named():
    for image in (3, "missing.png", picture(1).convert("CMYK")):
        with pytest.raises(BadAnswer, match="step gave .* for a text or an image"):
            as_observation([{"role": "user", "content": [{"type": "image", "image": image}]}], "step")
    picture(1).save(content := io.BytesIO(), "PNG")
    kinds = [picture(1), {"type": "image", "image": picture(1)}, {"type": "image", "image": content.getvalue()}]
    parts = as_observation([{"role": "user", "content": kinds}], "step")[0]["content"]
    assert parts[0] == parts[1] == parts[2]
