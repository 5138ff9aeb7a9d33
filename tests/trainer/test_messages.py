"""Messages of a run that cannot start name the place of the key in the configuration, once, and say what to do."""

from __future__ import annotations

import dataclasses
import shutil

from refusals import refusal
from trainer.runs import ppo_run
from trainer.test_sft import sft_run

from verl.component import BuildContext
from verl.compose.overrides import ALIASES
from verl.compose.schema import group_options
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.workers.actor import Actor


def test_a_model_without_a_tokenizer_is_refused_as_such_and_not_for_its_rows(model32, tmp_path):
    shutil.copytree(model32.path, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja", "vocab*"))
    with refusal("actor.model.path", value="no tokenizer"):
        ppo_run(Pretrained(path=str(tmp_path / "bare"))).build(BuildContext(run_dir=tmp_path / "run")).close()


def test_more_rows_a_step_than_there_are_are_refused_with_the_file_and_the_number_to_set(dir32, tmp_path):
    described = sft_run(dir32, tmp_path)
    described = dataclasses.replace(described, trainer=dataclasses.replace(described.trainer, batch_size=64))
    with refusal("trainer.batch_size", value=64):
        described.build(BuildContext(run_dir=tmp_path / "run")).close()


def test_a_layer_of_no_model_is_refused_by_the_place_of_its_key(model32):
    role = Actor(model=model32, optimizer=AdamW(lr=1e-3), lora=LoRA(target_modules=("nowhere",)))
    with refusal("actor.lora.target_modules", value=["nowhere"]):
        role.load("causal_lm", "cpu", None, "actor", Parallelism())


def test_every_sharding_is_an_option_of_the_key_of_other_programs():
    assert set(group_options()["sharding"]) <= set(ALIASES["trainer.backend"])
