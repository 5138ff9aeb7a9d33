"""Write the golden run of the current format: a checkpoint of a real PPO training, and what it must go on to.

A tiny model is trained for four steps. Kept are the model it starts from, its reward, the checkpoint after the second
step, and in `expected.json` the command line and the metrics of the other two. Every later version of verl must go on
from there to the same numbers, so a written directory is never written again: a new format version gets its own.

Example: python scripts/make_golden_run.py tests/golden/run_1_0
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.models.pretrained import quiet_transformers
from verl.models.tiny import character_tokenizer
from verl.trainer.state.compare_runs import steps_of

ROOT = Path(__file__).resolve().parents[1]
STEPS, KEPT = 4, 2
REWARD = "def variety(prompts, responses):\n    return [len(set(response)) for response in responses]\n"
OVERRIDES = [
    *("actor=pretrained", "actor.model.path=model", "actor.optimizer.lr=1e-3", "critic.optimizer.lr=1e-3"),
    *("algorithm=ppo_adaptive_kl", "algorithm.kl.target=0.1", "algorithm.kl.horizon=40"),
    *("data.digits=1", "data.held_out=2", "data.train_size=12", "rollout.max_new_tokens=6"),
    *("reward=function", "reward.path=reward.py:variety"),
    *("trainer.prompts_per_step=4", f"trainer.total_steps={STEPS}", "trainer.eval_interval=2", "trainer.num_threads=1"),
    *("trainer.device=cpu", "trainer.save_final=false"),
    *("checkpoint=sync", "checkpoint.save_interval=1", "checkpoint.keep_last_n=null"),
    "checkpoint.save_dir=checkpoints",
    *("tracker.tensorboard=null", "tracker.curves=null", "tracker.console.progress_bar=false"),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the run is written; must not exist")
    options = parser.parse_args(arguments)
    if options.directory.exists():
        parser.error(f"{options.directory} exists: what was written there once is to be gone on from for ever")
    with tempfile.TemporaryDirectory() as made:
        expected = train(Path(made))
        kept = f"checkpoints/global_step_{KEPT}"
        for part in ("model", kept):
            shutil.copytree(Path(made) / part, options.directory / part)
        shutil.copy(Path(made) / "reward.py", options.directory)
    (options.directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    size = sum(file.stat().st_size for file in options.directory.rglob("*") if file.is_file())
    print(f"{options.directory}: {kept}, {size / 1024:.0f} KiB in all")
    return 0


def train(directory: Path) -> dict:
    """Train in a directory; returns the command line, and the metrics of the steps after the one that is kept."""
    write_model(directory / "model")
    (directory / "reward.py").write_text(REWARD)
    command = [sys.executable, str(ROOT / "main_ppo.py"), *OVERRIDES, f"hydra.run.dir={directory / 'run'}"]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    steps = {step: numbers for step, numbers in steps_of(directory / "run").items() if step > KEPT}
    return {"overrides": OVERRIDES, "steps": steps}


def write_model(directory: Path) -> None:
    """A random language model of some thousand parameters, with the character tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
