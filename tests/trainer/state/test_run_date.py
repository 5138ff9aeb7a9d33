"""Chat templates that write the day's date: a run that is resumed on another day renders the same prompts."""

import json
import logging

import pytest

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.data import chat_template
from verl.trainer.ppo import PPOTrainer

# As Llama 3's: a date that the caller may set, else that of the day, in the words of `strftime_now`.
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<system>' + date_string + '<eos>' }}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture
def run(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(8)))

    def made(directory, template=DATED, *overrides):
        options = [
            "actor=tiny_scratch", "critic=none", "algorithm=grpo", "data=files", f"data.train_files=[{rows}]",
            "data.system_prompt=add", "data.max_prompt_length=40", "reward=length", "rollout.max_new_tokens=6",
            "trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.total_steps=1", "trainer.num_threads=1",
            "trainer.device=cpu", "trainer.eval_samples=0", "tracker=jsonl", "trainer.save_final=false",
            f"checkpoint.save_dir={tmp_path}/{directory.partition('-')[0]}", *overrides,
        ]  # fmt: skip
        config = compose_root("ppo", options)
        config.data.chat_template = template
        return PPOTrainer(validate(config), BuildContext(run_dir=tmp_path / directory))

    return made


def prompts_of(trainer):
    return [trainer.train_data[row]["prompt_text"] for row in range(8)]


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_on_another_day_renders_the_prompts_of_its_first(run, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(chat_template, "today", lambda: "2026-11-23")
    with run("a-first") as trainer:
        before = prompts_of(trainer)
        trainer.fit()
    assert before[0] == "<system>23 Nov 2026<eos><system>add<eos><user>0+0=<eos><assistant>"
    monkeypatch.setattr(chat_template, "today", lambda: "2026-11-24")
    with caplog.at_level(logging.INFO), run("a-second", DATED, "resume=latest", "trainer.total_steps=2") as trainer:
        assert prompts_of(trainer) == before
        chat = chat_template.ChatTemplate(trainer.actor_worker.tokenizer, DATED)
        text = chat.render([{"role": "user", "content": "1"}], "here", reply_follows=False)
        assert text == "<system>23 Nov 2026<eos><user>1<eos>"
        trainer.fit()
    assert "The chat template writes the day's date: 2026-11-23, as before this run was interrupted." in caplog.text
    (saved,) = tmp_path.glob("a/**/global_step_2/scheduler/state.json")
    assert json.loads(saved.read_text())["date"] == {"day": "2026-11-23"}
    with run("b") as trainer:  # another run begins on its own day
        assert prompts_of(trainer)[0].startswith("<system>24 Nov 2026")


def test_a_template_without_a_date_leaves_nothing_in_a_checkpoint(run):
    with run("plain", DATED.replace("strftime_now('%d %b %Y')", "'today'")) as trainer:
        assert "date" not in trainer.parts
