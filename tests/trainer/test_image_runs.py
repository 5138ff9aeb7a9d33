"""Whole runs on pictures: resumed bit by bit, saved as transformers reads them, and refused where they cannot be."""

from dataclasses import replace

import pytest
import torch
from refusals import refusal
from same_training import course, newest, same_training, saved
from trainer.runs import BRIEF_GRPO, GRPO_ALGORITHM, JSONL, fit, ppo_run, read_lines

from verl.algorithms.importance_sampling import TruncatedIS
from verl.component import BuildContext
from verl.data.shapes import ShapesPrompts, ShapesSFT
from verl.engines.optimizer import AdamW
from verl.engines.sharding import TP, NoSharding
from verl.models.images import ImageProcessor, images_of
from verl.models.tiny import TinyImageText
from verl.replay.config import TieredReplay
from verl.rewards.rules import ExactMatch
from verl.rollout.scripted import ScriptedRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.trainer.config import SFTSettings
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sft import SFTRun
from verl.workers.actor import Actor

MODEL = TinyImageText(
    dtype="float64", hidden_size=32, intermediate_size=32, num_heads=2, num_layers=1, vision_size=32, context_length=64
)
DATA = ShapesPrompts(train_size=12, held_out=4)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_and_its_checkpoint_opens_in_transformers(tmp_path):
    from transformers import AutoModelForImageTextToText

    options = {"data": DATA, "total_steps": 3, "algorithm": GRPO_ALGORITHM}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(course(MODEL, whole, **options), whole / "run")
    fit(course(MODEL, parts, **options), parts / "first")
    last = newest(parts).directory
    before = last.parent / "global_step_2"
    fit(course(MODEL, parts / "again", resume=before, **options), parts / "again" / "run")
    same_training(saved(parts / "again"), saved(whole), after=2)

    actor = newest(whole).directory / "actor"
    model = AutoModelForImageTextToText.from_pretrained(actor, dtype=torch.float64)
    start = MODEL.load_causal_lm("cpu").state_dict()
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, start[name])}
    assert {name.split(".")[1] for name in moved} >= {"vision_model", "connector", "text_model"}
    tokenizer = MODEL.load_tokenizer()
    loaded, original = ImageProcessor.of(actor, tokenizer), images_of(tokenizer)
    assert loaded is not None
    assert original is not None
    row = DATA.rows("eval")[0]
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False)
    (ids, media), (other_ids, others) = loaded.encode(text, row["images"]), original.encode(text, row["images"])
    assert ids == other_ids
    assert all(torch.equal(x, others[name]) for name, x in media.items())


@pytest.mark.slow
def test_rows_of_the_replay_buffer_keep_their_pictures_and_a_resumed_run_is_the_uninterrupted_one(
    tmp_path, monkeypatch
):
    trained_on, update = {}, PPOTrainer.update

    def noted(self, experience, step):
        pixels = experience["media.pixel_values"]
        rows = zip(experience["is_replayed"].tolist(), experience["media_keys"].tolist(), strict=True)
        trained_on[step] = [(is_old, key, pixels[row]) for row, (is_old, key) in enumerate(rows)]
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    options = {"data": DATA, "total_steps": 3, "replay": TieredReplay(memory_mib=8, shard_mib=1)}
    options |= {"algorithm": replace(GRPO_ALGORITHM, replay_fraction=0.5, correction=TruncatedIS())}
    fit(course(MODEL, tmp_path / "whole", **options), tmp_path / "whole/run")
    whole, seen = dict(trained_on), {key: x for rows in trained_on.values() for is_old, key, x in rows if not is_old}
    replayed = [(key, x) for rows in whole.values() for is_old, key, x in rows if is_old]
    assert len({key for key, _ in replayed}) > 1
    assert all(torch.equal(x, seen[key]) for key, x in replayed)
    before = newest(tmp_path / "whole").directory.parent / "global_step_2"
    fit(course(MODEL, tmp_path / "again", resume=before, **options), tmp_path / "again/run")
    trainings = [saved(tmp_path / name) for name in ("again", "whole")]
    for line in (line for training in trainings for line in training.metrics.values()):
        del line["replay/memory_mib"]  # Arrow adds a byte or two to columns that it has read
    same_training(*trainings, after=2)


@pytest.mark.slow
def test_sft_learns_from_pictures(tmp_path):
    run = SFTRun(
        actor=Actor(model=MODEL, optimizer=AdamW(lr=1e-2)),
        sharding=NoSharding(),
        data=ShapesSFT(train_size=64, held_out=8),
        trainer=SFTSettings(batch_size=16, total_steps=8, num_threads=1, eval_interval=8),
        tracker=JSONL,
    )
    fit(run, tmp_path / "run")
    losses = [line["sft/loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "sft/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"sharding": TP(), "n_gpus_per_node": 2}, "sharding.tp"),
        ({"rollout": ScriptedRollout(texts=("3",), max_new_tokens=8)}, "rollout"),
        ({"rollout": VLLMRollout(max_new_tokens=8, tensor_parallel_size=2)}, "rollout.tensor_parallel_size"),
        ({"rollout": VLLMRollout(max_new_tokens=8, lora="adapter")}, "rollout.lora"),
    ],
    ids=["tp", "an engine that reads none", "an engine of two", "an adapter"],
)
def test_a_run_that_cannot_have_images_is_refused_before_weights_are_loaded(options, path, tmp_path, monkeypatch):
    monkeypatch.setattr(TinyImageText, "load_causal_lm", None)
    run = ppo_run(MODEL, BRIEF_GRPO, data=DATA, reward=ExactMatch(), **options)
    with refusal(path):
        run.build(BuildContext(run_dir=tmp_path))
