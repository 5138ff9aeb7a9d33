"""Whole runs on rows with images: fine-tuning, preferences and reward models see the pictures of their rows."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.episodes import Scripted, ends_after, engine_of
from environments.picture_game import PictureGames
from image_models import picture, save_image_model
from model_paths.test_images import plain_inputs, plain_model
from refusals import refusal
from same_training import same_training, saved
from trainer.runs import fit
from trainer.test_async_episodes import in_flight, playing
from trainer.test_async_training import MODES

from verl.algorithms.preference_losses import DPO, BradleyTerry
from verl.component import BuildContext
from verl.data.files import PreferenceFiles, PromptFiles, SFTFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.engines.optimizer import AdamW
from verl.engines.sharding import NoSharding
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.tracking.base import Trackers
from verl.trainer.config import SFTSettings
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sft import PreferenceRun, RewardModelRun, SFTRun
from verl.workers.actor import Actor
from verl.workers.reference import Reference

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("model") / "model", FAMILY)


def data_file(directory: Path, **columns: str) -> tuple[str]:
    """Rows of equal text: two pictures, one, another one, and none."""
    for number in range(3):
        picture(number, 24 + 8 * number).save(directory / f"{number}.png")
    named: list[list[str]] = [["0.png", "1.png"], ["1.png"], ["2.png"], []]
    rows = [{"prompt": [{"role": "user", "content": "how many?"}], "images": names, **columns} for names in named]
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(file),)


def parts(path: Path, **settings: Any) -> dict[str, Any]:
    source = Pretrained(path=str(path), dtype="float64", images=True)
    return {
        "actor": Actor(model=source, optimizer=AdamW(lr=3e-3), micro_batch_tokens=60),
        "sharding": NoSharding(),
        "trainer": SFTSettings(total_steps=2, batch_size=4, num_threads=1, eval_interval=0, **settings),
        "tracker": Trackers(),
    }


def plain_log_probs(path: Path, batch: Any, row: int) -> torch.Tensor:
    """Log-probs of the tokens of a row after the first, by transformers, for the row alone."""
    model = plain_model(path)
    inputs = plain_inputs(model, batch, row)
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[0, :, 0]


@pytest.mark.slow
def test_the_loss_of_fine_tuning_is_that_of_transformers_for_each_row_with_its_images(model, tmp_path):
    data = SFTFiles(train_files=data_file(tmp_path, completion="three"), max_length=400)
    with SFTRun(data=data, **parts(model)).build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        batch = trainer.train_data.collate(range(4))
        found = [trainer.learner.evaluate(batch[row : row + 1]).result()["nll"] for row in range(4)]
        together = trainer.learner.evaluate(batch).result()["nll"]
        assert trainer.fit().steps == 2
    expected = []
    for row in range(4):
        learned = batch["loss_mask"][row][batch["attention_mask"][row].bool()][1:]
        expected.append(-float(plain_log_probs(model, batch, row)[learned].sum()))
    assert found == pytest.approx(expected, abs=1e-9)
    assert together == pytest.approx(sum(expected), abs=1e-9)
    assert len({round(x, 6) for x in expected}) == 4  # equal texts: only the pictures differ


@pytest.mark.slow
def test_scores_of_preferences_are_those_of_transformers_for_each_row_with_its_images(model, tmp_path):
    data = PreferenceFiles(
        train_files=data_file(tmp_path, chosen="three", rejected="two"), max_prompt_length=400, max_length=400
    )
    run = PreferenceRun(data=data, loss=DPO(), reference=Reference(), **parts(model))
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        batch = trainer.train_data.collate(range(4))
        found = trainer.learner.row_scores(batch).result()["row_scores"]
        role: Any = trainer.reference
        reference = role.compute_log_probs(batch).result()["ref_log_probs"].sum(1)
        assert trainer.fit().steps == 2
    expected = []
    for row in range(8):
        count = int(batch["response_mask"][row].sum())
        expected.append(float(plain_log_probs(model, batch, row)[-count:].sum()))
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert reference.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_a_reward_model_tells_rows_of_equal_text_by_their_images(tmp_path):
    data = PreferenceFiles(
        train_files=data_file(tmp_path, chosen="three", rejected="two"), max_prompt_length=400, max_length=400
    )
    run = RewardModelRun(data=data, loss=BradleyTerry(), **parts(save_image_model(tmp_path / "model", "gemma3")))
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        assert trainer.fit().steps == 2
        scores = trainer.learner.row_scores(trainer.train_data.collate(range(4))).result()["row_scores"]
        alone = [trainer.learner.row_scores(trainer.train_data.collate([i])).result()["row_scores"] for i in range(4)]
    assert scores.unique().numel() == 8
    assert torch.allclose(torch.stack(alone).T.flatten(), scores, atol=1e-9)


@pytest.mark.slow
def test_a_family_without_a_classifier_is_refused_as_a_reward_model(model, tmp_path):
    data = PreferenceFiles(
        train_files=data_file(tmp_path, chosen="a", rejected="b"), max_prompt_length=99, max_length=400
    )
    with refusal("actor.model", value="Qwen2_5_VLModel"):
        RewardModelRun(data=data, loss=BradleyTerry(), **parts(model)).build(BuildContext(run_dir=tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drain", "in_flight"])
def test_a_run_resumed_with_responses_to_images_drawn_ahead_has_the_bits_of_the_first(kind, model, tmp_path):
    begun = MODES["recompute" if kind == "in_flight" else kind]
    source = Pretrained(path=str(model))
    data = PromptFiles(train_files=data_file(tmp_path, answer="3"), max_prompt_length=400)
    fit(begun(source, tmp_path / "first", 2, data=data), tmp_path / "first/run")
    replay = {"replay_schedule": str(tmp_path / "first/run")} if kind == "in_flight" else {}
    first, resume = saved(tmp_path / "first"), tmp_path / "first/checkpoints/global_step_2"
    fit(begun(source, tmp_path / "cut", 2, data=data, resume=resume, **replay), tmp_path / "cut/run")
    same_training(saved(tmp_path / "cut"), first, after=2)


def rows_of(batch: DataProto) -> list[tuple[int, bytes, float]]:
    """Digest and pixels of the images of each row, and the sum of its log-probs."""
    pixels = [x.numpy().tobytes() for x in map(batch["media.pixel_values"].__getitem__, range(len(batch)))]
    return list(zip(batch["media_keys"].tolist(), pixels, batch["rollout_log_probs"].sum(1).tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "in_flight"])
def test_a_resumed_run_of_episodes_that_show_images_has_the_bits_of_the_first(kind, model, tmp_path, monkeypatch):
    source, seen, update = Pretrained(path=str(model), dtype="float64"), [], PPOTrainer.update

    def noted(self, experience, step):
        seen.append((step, sorted(rows_of(experience))))
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    options: dict[str, Any] = {"data": PromptFiles(train_files=data_file(tmp_path, answer="3"), max_prompt_length=200)}
    options["environment"] = PictureGames(images=True, max_tokens=200, max_turns=3)
    make = in_flight if kind == "in_flight" else functools.partial(playing, mode="sync", max_staleness=1)
    fit(make(source, tmp_path / "first", **options), tmp_path / "first/run")
    last, replay = max(step for step, _ in seen), {}
    if kind == "in_flight":
        replay = {"replay_schedule": str(tmp_path / "first/run")}
    resume = tmp_path / "first/checkpoints/global_step_2"
    fit(make(source, tmp_path / "cut", resume=resume, **options, **replay), tmp_path / "cut/run")
    same_training(saved(tmp_path / "cut"), first := saved(tmp_path / "first"), after=2)
    assert seen[last:] == seen[2:last]
    assert len({key for _, rows in seen[:last] for key, *_ in rows}) > 2 * last
    for line in first.metrics.values():
        assert kind == "in_flight" or line["rollout/log_prob_gap_nats"] < 1e-9


@pytest.mark.parametrize("lacks", ["chats", "a model"])
def test_images_of_an_environment_are_refused_where_nothing_reads_them(lacks, model, tmp_path):
    file, source = tmp_path / "rows.jsonl", Pretrained(path=str(model), images=True)
    prompt: Any = "how many?" if lacks == "chats" else [{"role": "user", "content": "how many?"}]
    file.write_text((json.dumps({"prompt": prompt}) + "\n") * 2)
    run = playing(
        source if lacks == "chats" else TinyModel(context_length=160),
        tmp_path,
        environment=PictureGames(images=True, max_tokens=60),
        data=PromptFiles(train_files=(str(file),), max_prompt_length=40),
    )
    with refusal("environment.images", value=True):
        run.build(BuildContext(run_dir=tmp_path / "run"))


@pytest.mark.slow
def test_every_turn_of_an_episode_sees_the_images_of_its_prompt(model, tmp_path):
    source = Pretrained(path=str(model), dtype="float64", images=True)
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    data = RLHFDataset(data_file(tmp_path), tokenizer, {"max_prompt_length": 400})
    prompts = data.collate(range(4)).union(DataProto.from_dict({"group_ids": torch.arange(4)}))
    environment = Scripted(answer=ends_after(3, "again\n", 1.0))
    with contextlib.closing(
        engine_of(environment, model=(net, tokenizer), stop_token_ids=tuple(range(20, 60)))
    ) as engine:
        rows = engine.generate(prompts, GenerationRequest(0, 2))
    rows = rows.union(prompts.select([], [])[rows["group_ids"]])  # as the driver does
    assert max(len(record["turns"]) for record in rows["episode"]) == 3
    assert rows["media_keys"].tolist() == prompts["media_keys"].repeat_interleave(2).tolist()
    chosen = rows["responses"] != net.config.image_token_id  # transformers refuses a row that has sampled one
    checked = 0
    for row in range(len(rows)):
        mask = rows["response_mask"][row]
        if bool((chosen[row] | ~mask).all()):
            count = int(rows["attention_mask"][row, rows["prompts"].shape[1] :].sum())
            plain = plain_log_probs(model, rows, row)[-count:][mask[:count]]
            assert torch.allclose(rows["rollout_log_probs"][row][mask], plain, atol=1e-9)
            checked += 1
    assert checked > 3


def test_a_conversation_that_is_rendered_again_is_refused_with_images(model, tmp_path):
    source = Pretrained(path=str(model), images=True)
    net, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    prompts = RLHFDataset(data_file(tmp_path), tokenizer, {"max_prompt_length": 400}).collate([0])
    prompts = prompts.union(DataProto.from_dict({"group_ids": torch.arange(1)}))
    environment = Scripted(answer=ends_after(2, "again", 1.0), history="rerender")
    with contextlib.closing(engine_of(environment, model=(net, tokenizer))) as engine, refusal("environment.history"):
        engine.generate(prompts, GenerationRequest(0, 1))
