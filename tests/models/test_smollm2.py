"""SmolLM2-135M-Instruct, a real chat model: what only its template, weights and tokenizer can show, in a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer.runs import read_lines, step_lines, without_times
from typer.testing import CliRunner

from verl.cli.checkpoint import app
from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.data.chat_task import ChatTaskSFT
from verl.models.pretrained import Pretrained

pytestmark = pytest.mark.xdist_group("smollm2")
QUIET = ["tracker.tensorboard=null", "trainer.num_threads=1", "trainer.save_final=false"]
SMALL = ["trainer.prompts_per_step=4", "data.train_size=32", "data.held_out=2", "trainer.eval_before=false"]
LORA = ["+actor.lora.rank=16", "+actor.lora.alpha=32"]
STEPS = 4


def trained(model: Pretrained, run_dir: Path, *words: str) -> list[dict[str, Any]]:
    """Lines about the steps of a run of `smollm2_json` with an adapter."""
    named = [f"actor.model.path={model.path}", "actor.optimizer.lr=5e-4", *LORA, *SMALL, *QUIET]
    run = validate(compose_root("ppo", ["experiment=smollm2_json", *named, *words]))
    with run.build(BuildContext(run_dir=run_dir)) as trainer:
        trainer.fit()
    return step_lines(run_dir)


@pytest.fixture(scope="module")
def first(smollm2: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Checkpoints and steps of a run; the one before its last step is kept."""
    directory = tmp_path_factory.mktemp("first")
    saving = [f"checkpoint.save_dir={directory}/saved", f"checkpoint.save_interval={STEPS - 1}"]
    return directory / "saved", trained(smollm2, directory / "run", f"trainer.total_steps={STEPS}", *saving)


@pytest.mark.slow
def test_a_few_steps_teach_it_the_answer_that_is_asked_for(first: tuple[Path, list[dict[str, Any]]]) -> None:
    rewards = [line["reward/mean"] for line in first[1]]
    assert len(rewards) == STEPS
    assert rewards[-1] > rewards[0] + 0.3, rewards


@pytest.mark.slow
def test_a_resumed_run_repeats_the_step_bit_by_bit(
    smollm2: Pretrained, first: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    resume = [f"resume={first[0]}/global_step_{STEPS - 1}", "checkpoint=off", f"trainer.total_steps={STEPS}"]
    (again,) = trained(smollm2, tmp_path / "run", *resume)
    assert without_times(again) == without_times(first[1][-1])


@pytest.mark.slow
def test_an_exported_adapter_has_the_same_log_probs_in_plain_peft_as_merged_in_plain_transformers(
    smollm2: Pretrained, first: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name, words in (("adapter", []), ("merged", ["--merge"])):
        told = CliRunner().invoke(app, ["export", f"{first[0]}/global_step_{STEPS}", f"{tmp_path}/{name}", *words])
        assert told.exit_code == 0, told.output
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "merged")
    row = next(iter(ChatTaskSFT(task="json", train_size=1, held_out=1).rows("eval")))
    chat = [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
    tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(smollm2.files(), dtype=torch.float32)
    with torch.inference_mode():
        before = base(tokens).logits.log_softmax(-1)
        in_peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(tokens).logits.log_softmax(-1)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(tokens).logits
        ours = Pretrained(path=str(tmp_path / "adapter")).load_causal_lm("cpu")(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(in_peft, merged.log_softmax(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(in_peft, ours, rtol=1e-4, atol=1e-4)
    assert (in_peft - before).abs().mean() > 0.01


def test_fine_tuning_learns_the_answer_and_the_end_of_the_turn_and_nothing_else(smollm2: Pretrained) -> None:
    tokenizer: Any = smollm2.load_tokenizer()
    source = ChatTaskSFT(task="json", train_size=2, held_out=1)
    row = source.build(BuildContext(tokenizer=tokenizer)).train
    batch = row.collate([0, 1])
    for tokens, mask, problem in zip(batch["input_ids"], batch["loss_mask"], source.rows("train"), strict=True):
        assert tokenizer.decode(tokens[mask.bool()]) == f"{problem['answer']}<|im_end|>"
        assert tokenizer.decode(tokens).endswith("<|im_end|>")


@pytest.mark.slow
def test_vllm_draws_from_it_with_the_log_probs_of_the_trainer(smollm2: Pretrained, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    words = ["rollout=vllm", "rollout.kv_cache_gib=0.2", "rollout.num_threads=1", "rollout.max_new_tokens=24"]
    words += ["trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.total_steps=2", "checkpoint=off"]
    trained(smollm2, tmp_path, *words)
    lines = read_lines(tmp_path / "metrics.jsonl")
    gaps = [line["rollout/log_prob_gap_nats"] for line in lines if "rollout/log_prob_gap_nats" in line]
    assert len(gaps) == 2
    assert max(gaps) < 0.05  # bfloat16 against bfloat16 of other kernels
