"""How two configurations differ, and that content counts, not the name of a file."""

from verl.trainer.state.training_identity import ABSENT, differences, identity_of, replay_identity


class Letters:
    """As much of a tokenizer as its digest reads."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def get_vocab(self):
        return {"a": 0, "b": 1}


def test_differences_name_the_path_and_both_values():
    before = {"actor": {"lr": 1.0, "sizes": (1, 2)}, "seed": 0, "gone": 1}
    now = {"actor": {"lr": 2.0, "sizes": [1, 2]}, "seed": 0, "new": None}
    assert differences(before, now) == {"actor.lr": [1.0, 2.0], "gone": [1, ABSENT], "new": [ABSENT, None]}


def test_of_a_component_that_was_replaced_or_left_out_the_target_alone_is_told():
    before = {"x": {"_target_": "A", "a": 1, "part": {"_target_": "C", "c": 1}}, "y": {"_target_": "B", "b": 1}, "z": 1}
    now = {"x": {"_target_": "D", "d": 1, "part": None}, "y": None, "z": 2}
    assert differences(before, now) == {"x._target_": ["A", "D"], "y._target_": ["B", ABSENT], "z": [1, 2]}


def test_identity_holds_the_content_of_files_and_leaves_out_what_may_change(tmp_path):
    for name, text in (("one", "same"), ("two", "same"), ("three", "other")):
        (tmp_path / name).write_text(text)

    def identity(name: str, lr: float = 1.0):
        data = {"train_files": [str(tmp_path / name)], "prompt_key": "prompt"}
        return identity_of({"data": data, "actor": {"optimizer": {"lr": lr}, "model": {"dtype": "x"}}}, Letters())

    assert identity("one") == identity("two", lr=2.0)
    assert list(differences(identity("one"), identity("three"))) == ["data.train_files"]
    assert set(identity("one")) == {"data.train_files", "data.prompt_key", "actor.model.dtype", "tokenizer"}


def test_a_resumed_run_may_compile_its_model_and_one_of_before_that_was_possible_goes_on():
    def saved(**model):
        return {"actor": {"model": {"dtype": "float32", **model}}}

    assert (
        identity_of(saved(), None) == identity_of(saved(compile=False), None) == identity_of(saved(compile=True), None)
    )
    assert identity_of(saved(), None) != identity_of({"actor": {"model": {"dtype": "bfloat16"}}}, None)


def test_a_replay_needs_the_score_by_which_a_curriculum_draws_prompts():
    config = {"trainer": {"success_score": 0.5, "sample_rows": 3, "seed": 1}}
    assert replay_identity(config) == {"trainer.success_score": 0.5, "trainer.seed": 1}


def test_a_replay_needs_the_code_of_functions_and_components_that_are_not_of_verl(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "their_rewards.py"
    config = {
        "reward": {"_target_": "their_rewards.Mine", "path": "their_rewards:score"},
        "tracker": {"_target_": "a.B"},
    }

    def identity(text):
        module.write_text(text)
        return replay_identity(config)

    before, after = identity("x = 1"), identity("x = 2")
    assert [name for name in before if before[name] != after[name]] == [
        "source of reward._target_",
        "source of reward.path",
    ]
    assert before == identity("x = 1")
