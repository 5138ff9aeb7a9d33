"""Secrets leave every text that is printed or saved, and ordinary text stays as it is."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.redact import MASK, RedactSecrets, looks_secret, redact, redact_output, redact_tree

SECRETS = {
    "https://anna:hunter2@host.example/x": "hunter2",
    "redis://:p@ss:word@host:6379/0": "word",
    "https://0123456789abcdef0123@git.example/r.git": "0123456789abcdef",
    "https://h.example/a?token=abc123&page=2": "abc123",
    "https://b.example/o?X-Amz-Credential=AKX&X-Amz-Signature=feedbeef&n=1": "feedbeef",
    "https://b.example/o?X-Amz-Credential=AKX/2026&n=1": "AKX",
    "https://b.example/o?AWSAccessKeyId=ABCDE&x=1": "ABCDE",
    "https://hooks.slack.com/services/T00000000/B00000000/a1B2c3D4e5F6g7H8i9J0k1L2": "a1B2c3D4e5F6",
    "https://api.example/bot123456:AAbbCCddEEffGGhhIIjj/send": "AAbbCCddEEff",
    "GET http://h.example/v1/0123456789abcdefABCDEF01/x/0123456789abcdefABCDEF02": "cdefABCDEF0",
    "Authorization: Bearer abcd": "abcd",
    "{'Authorization': 'Basic dXNlcjpwYXNz'}": "dXNlcjpwYXNz",
    "curl -H bearer 12345678abc": "12345678abc",
    "key sk-ant-api03-AbCdEf0123456789 was used": "AbCdEf0123456789",
    "hf_AbCdEfGhIjKlMnOpQrSt": "AbCdEfGhIj",
    "AKIAIOSFODNN7EXAMPLE": "IOSFODNN7",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345": "0123456789abc",
    "github_pat_0123456789abcdefghij": "0123456789abc",
    "tracker.wandb.api_key=0123456789abcdef": "0123456789abcdef",
    '{"password": "abc"}': "abc",
    "password: abc": "abc",
    "error: password=abc": "abc",
    "WANDB_API_KEY=deadbeefdeadbeef": "deadbeefdeadbeef",
    "token=AbCdEfGhIj": "AbCdEfGhIj",
    "AccountName=x;AccountKey=Zm9vYmFyYmF6;Endpoint=y": "Zm9vYmFyYmF6",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----": "MIIE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl": "eyJzdWIi",
}

ORDINARY = [
    "https://huggingface.co/Qwen/Qwen2-0.5B-Instruct/resolve/main/model.safetensors",
    "https://docs.example/how-to-run-a-very-long-title-of-a-page/index.html",
    "max_tokens=8",
    "max_tokens: 8192000000",
    "micro_batch_tokens=16384000",
    "token_level_rewards=float32[B,T] of 384 rows",
    "tokenizer_path=/models/tokenizer/qwen2-large",
    "the next token: 42 and the bad token: unexpected",
    "eos_token='<|endoftext|>' pad_token: '<|padding|>'",
    "reward.answer_key=final_answer prompt_key=question_text",
    "num_key_value_heads=8 key=lambda-row group_key: prompt_ids",
    "[gen] 1.24s  384 responses, 1536 tokens",
    "policy_loss/clip_fraction=0.0123 tokens_per_s=12345.678",
    "a task-force of sk-learn-estimators-and-pipelines",
    "hf_rollout_generate_shared_prefix",
    "bearer instruments are not responsible",
    "ssh://git@github.com/org/repo.git http://localhost:8000/v1?model=tiny&max_tokens=12345678",
    "see https://example.com/a:b@c and mail anna@example.com",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "SecretaryBench is a data set; authorisation is not needed",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_leaves_the_text(text):
    clean = redact(text)
    assert SECRETS[text] not in clean
    assert MASK in clean
    assert redact(clean) == clean


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_not_touched(text):
    assert redact(text) == text


def test_what_surrounds_a_secret_stays():
    assert (
        redact("https://anna:hunter2@h.example/x?page=2&token=abc") == "https://anna:***@h.example/x?page=2&token=***"
    )
    assert redact("Authorization: Bearer abcd, Accept: json") == "Authorization: ***, Accept: json"


def test_the_value_of_a_secret_environment_variable_is_masked_anywhere(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plain words/too")
    monkeypatch.setenv("SOME_KEY", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    monkeypatch.setenv("SSH_KEY_PATH", "/home/anna/id")
    assert redact("a plain words/too b plain%20words%2Ftoo") == "a *** b ***"
    assert redact("short falsefalse /home/anna/id") == "short falsefalse /home/anna/id"


def test_a_secret_that_contains_another_goes_whole(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefghijklm")
    assert redact("x abcdefghijklm y") == "x *** y"


def test_a_tree_is_masked_by_its_keys_and_keeps_its_form():
    tree = {
        "wandb": {"api_key": "short", "project": "p", "hub": {"token": "t"}},
        "max_tokens": 8,
        "answer_key": "answer",
        "pad_token": "<pad>",
        "password": 12345,
        "credentials": {"user": "anna", "values": ["a", ("b", 3)], "enabled": True, "none": None},
        "urls": ["https://u:p4ss@h", 3, None],
        "path": Path("/data"),
    }
    assert redact_tree(tree) == {
        "wandb": {"api_key": MASK, "project": "p", "hub": {"token": MASK}},
        "max_tokens": 8,
        "answer_key": "answer",
        "pad_token": "<pad>",
        "password": MASK,
        "credentials": {"user": MASK, "values": [MASK, (MASK, MASK)], "enabled": True, "none": None},
        "urls": ["https://u:***@h", 3, None],
        "path": Path("/data"),
    }
    assert tree["wandb"]["api_key"] == "short"


SECRET_KEYS = "api_key openaiApiKey storage.secret_access_key token hub_token access_tokens db_pwd"
OTHER_KEYS = "PWD key tokenizer max_new_tokens eos_token eos_token_id password_file token_level_scores"


def test_a_config_key_is_judged_by_its_words():
    assert [key for key in SECRET_KEYS.split() if not looks_secret(key)] == []
    assert [key for key in ("", *OTHER_KEYS.split()) if looks_secret(key)] == []


def test_the_filter_cleans_message_arguments_and_traceback():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactSecrets())
    log = logging.getLogger("redaction")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    log.info("opened %s for %s", "https://u:p4ss@h", "anna")
    try:
        raise ValueError("password=p4ss")
    except ValueError:
        log.exception("failed")
    log.info(*("two %s %s", "https://u:p4ss@h"))
    log.removeHandler(handler)
    text = stream.getvalue()
    assert "p4ss" not in text
    assert "opened https://u:***@h for anna" in text
    assert "ValueError: password=***" in text


@given(st.text(alphabet="ab1=:/?&@.\"' -_\n", max_size=60) | st.text(max_size=40))
def test_redacting_twice_is_redacting_once(text):
    once = redact(f"token={text} https://u:{text}@h {text}")
    assert redact(once) == once


def test_what_code_of_others_prints_is_redacted(monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_API_KEY", "plain-words-secret")
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    redact_output()
    redact_output()
    print("the key is", "plain-words-secret", "of 3")  # noqa: T201
    assert out.getvalue() == f"the key is {MASK} of 3\n"


CLOSED = """
import os, subprocess, sys
from verl.utils.redact import redact_output
redact_output()
with open("file", "w") as file:
    print("not for the file")
    sys.stderr.write(sys.stdin.read() + "nor this")
    status = subprocess.run(["echo", "nor that"], check=False).returncode
    file.write(f"{status} {file.fileno() > 2}")
"""


def test_what_is_printed_to_streams_that_are_closed_goes_to_no_file(tmp_path):
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run(closing, cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "0 True"
