"""The character tokenizer: one id per character, the same for ever, and nothing lost on the way back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from transformers import AutoTokenizer, Qwen2Config

from verl.models.interfaces import tokenizer_fault
from verl.models.pretrained import Pretrained
from verl.models.tiny import CHARACTERS, TinyModel, character_tokenizer

TOKENIZER = character_tokenizer()


def test_ids_are_few_and_fixed_one_for_each_character():
    assert len(TOKENIZER) == 6 + len(CHARACTERS) == 102
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id) == (0, 1, 2)
    assert TOKENIZER("37+58=\n")["input_ids"] == [11, 15, 80, 13, 16, 6 + CHARACTERS.index("="), 6]
    assert TOKENIZER.encode("1é2") == TOKENIZER.encode("1日本2") == [9, 2, 10]  # a run of unknown ones is one <unk>
    assert TOKENIZER.decode(TOKENIZER.encode("95<eos>")) == "95<eos>"
    assert TOKENIZER.decode([0, 0, 11, 1, 0], skip_special_tokens=True) == TOKENIZER.decode([11])
    assert TOKENIZER(["1", "123"], padding=True)["input_ids"] == [[0, 0, 9], [9, 10, 11]]  # to the left


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=CHARACTERS))
def test_any_text_of_known_characters_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert (len(ids), TOKENIZER.decode(ids)) == (len(text), text)


def test_chat_messages_are_told_apart_by_tokens_of_their_roles():
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<system>Add.<eos><user>1+1=<eos><assistant>2<eos><assistant>"
    assert len(TOKENIZER.encode(text)) == 4 + 4 + 1 + 3 * 2 + 1


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_it_comes_back_from_a_directory_as_it_was(tmp_path, beside_a_model):
    if beside_a_model:
        Qwen2Config(vocab_size=102).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "37+58=95, \n said  he's 'quoted'\n\n  <eos>" + CHARACTERS
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode("a  b ,c\n")) == "a  b ,c\n"
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.padding_side, loaded.pad_token_id, loaded.eos_token_id) == ("left", 0, 1)
    assert loaded.chat_template == TOKENIZER.chat_template


def test_a_saved_model_may_be_the_teacher_of_the_built_in_one(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(TOKENIZER)).save_pretrained(tmp_path)  # with it transformers chooses a class of its own
    source = Pretrained(path=str(tmp_path))
    assert tokenizer_fault("reference.model", source, TOKENIZER) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with refusal("reference.model.path", varies=True):
        tokenizer_fault("reference.model", source, TOKENIZER)


def test_a_long_text_is_tokenised_without_a_word_of_transformers(tmp_path, capfd):
    TOKENIZER.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(TOKENIZER)).save_pretrained(tmp_path)
    for source in (Pretrained(path=str(tmp_path)), TinyModel(context_length=64)):
        tokenizer = source.load_tokenizer()
        tokenizer.model_max_length = 64
        assert len(tokenizer(["1" * 100])["input_ids"][0]) == 100
    assert "sequence length" not in capfd.readouterr().err
