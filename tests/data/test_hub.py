"""`data=hub` reads directories of `save_to_disk`, of parquet and of JSONL alike, and pins what it read from a hub."""

import dataclasses
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from on_use import OnUse
from refusals import refusal

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.data.hub import HubPrompts
from verl.errors import ConfigError
from verl.models.tiny import TinyModel
from verl.trainer.state.training_identity import identity_of

datasets = OnUse("datasets")
ROWS = [{"question": f"What is {i}+{i}?", "answer": f"Twice {i}.\n#### {i + i}", "level": i} for i in range(7)]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GSM8K = {"prompt": "question", "answer": "answer", "answer_after": "####", "chat_template": TEMPLATE}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    """The same data in every local form."""
    place = tmp_path_factory.mktemp("data")
    parts = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    )
    parts.save_to_disk(str(place / "saved"))
    parts["train"].save_to_disk(str(place / "alone"))
    for name in ("parquet", "jsonl"):
        (place / name).mkdir()
        for split, rows in parts.items():
            file = str(place / name / f"{split}.{name}")
            rows.to_parquet(file) if name == "parquet" else rows.to_json(file)
    return {path.name: path for path in place.iterdir()}


@pytest.fixture(scope="module")
def context() -> BuildContext:
    return BuildContext(tokenizer=TinyModel().load_tokenizer())


@pytest.mark.parametrize("form", ["saved", "parquet", "jsonl"])
def test_every_form_gives_the_same_prompts_answers_and_columns(form, directories, context):
    source = HubPrompts(dataset=str(directories[form]), eval_split="test", instruction="After ####.", **GSM8K)
    splits = source.build(context)
    batch = splits.train.collate([3, 0])
    assert batch.non_tensor_batch["prompt_text"].tolist() == [
        "<user>What is 3+3?\nAfter ####.", "<user>What is 0+0?\nAfter ####."
    ]  # fmt: skip
    assert batch.non_tensor_batch["answer"].tolist() == ["6", "0"]
    assert batch.non_tensor_batch["level"].tolist() == [3, 0]
    assert (len(splits.train), len(splits.eval), batch["prompt_ids"].tolist()) == (7, 2, [3, 0])


def test_texts_stay_texts_without_a_chat_template_and_as_they_are_asked(directories, context):
    kept = {"dataset": str(directories["alone"]), "prompt": "question", "keep_columns": (), "max_rows": 3}
    plain = HubPrompts(**kept, as_chat=False, chat_template=TEMPLATE).build(context).train
    assert plain[1]["prompt_text"] == "What is 1+1?"
    assert (len(plain), plain.columns) == (3, ["prompt_text"])
    assert HubPrompts(**kept, chat_template=TEMPLATE).build(context).train[1]["prompt_text"] == "<user>What is 1+1?"


@pytest.mark.parametrize(
    ("form", "settings", "names", "value"),
    [
        ("saved", {"prompt": "qestion", "answer": "x"}, ("prompt", "answer"), "question, answer"),
        ("saved", {"eval_split": "dev"}, ("eval_split",), "splits train, test"),
        ("alone", {"split": "test"}, ("split",), "splits train"),
        ("jsonl", {"split": "dev"}, ("split",), "train"),
        ("saved", {"answer": "level"}, ("level",) * 5, "row 0"),
        ("saved", {"answer_after": "=="}, ("answer",) * 5, "=="),
        ("saved", {"revision": "main"}, ("revision",), "main"),
    ],
)
def test_a_fault_names_the_setting_and_what_there_is(form, settings, names, value, directories, context):
    with refusal(*names, value=value):
        HubPrompts(dataset=str(directories[form]), **GSM8K | settings).build(context)


@pytest.mark.parametrize("dataset", ["./nowhere", "/nowhere/train", "a/b/c", "train.jsonl/"])
def test_what_is_neither_a_directory_nor_a_name_is_refused_without_asking_the_hub(dataset):
    with refusal("dataset", value=dataset):
        raise ConfigError(list(HubPrompts(dataset=dataset, **GSM8K).machine_faults()))


def test_a_row_without_an_answer_is_left_out_and_the_others_keep_their_ids(tmp_path, context):
    rows = [{**row, "answer": "none" if row["level"] == 2 else row["answer"]} for row in ROWS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = HubPrompts(dataset=str(tmp_path), on_bad_row="skip", **GSM8K).build(context).train
    assert data.collate(range(6))["prompt_ids"].tolist() == [0, 1, 3, 4, 5, 6]


def test_a_column_of_a_batch_field_is_refused_unless_it_is_left_out(tmp_path, context):
    (tmp_path / "train.jsonl").write_text(json.dumps({**ROWS[0], "responses": "x"}) + "\n")
    source = {"dataset": str(tmp_path), **GSM8K}
    with refusal("keep_columns", value=None):
        HubPrompts(**source).build(context)
    assert len(HubPrompts(**source, keep_columns=("level",)).build(context).train) == 1


def test_the_identity_has_the_content_of_a_directory_not_its_name(tmp_path):
    for name, answer in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"prompt": "x", "answer": answer}) + "\n")
    a, b, c = (identity_of({"data": {"dataset": str(tmp_path / name), "split": "train"}}, None) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    "named",
    ["{url}", "../secret.jsonl", "{outside}", "zip://secret.jsonl::{url}", "file://{outside}", "*/../../*.jsonl"],
)
def test_a_local_directory_gives_the_rows_of_its_own_files_whatever_its_readme_names(named, tmp_path, context):
    (tmp_path / "secret.jsonl").write_text(json.dumps({**ROWS[0], "answer": "#### secret"}) + "\n")
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "train.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    named = named.format(url="http://127.0.0.1:9/secret.jsonl", outside=tmp_path / "secret.jsonl")
    header = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '{named}'\n"
    (directory / "README.md").write_text(f"---\n{header}---\n")
    data = HubPrompts(dataset=str(directory), **GSM8K).build(context).train
    assert data.collate([0]).non_tensor_batch["answer"].tolist() == ["2"]


def test_what_leads_out_of_a_local_directory_is_refused(directories, tmp_path, context):
    def open_it(directory: Path) -> int:
        return len(HubPrompts(dataset=str(directory), **GSM8K).build(context).train)

    for name, target in (("link.jsonl", "train.jsonl"), ("up.jsonl", "../jsonl/train.jsonl")):
        (tmp_path / name.partition(".")[0]).mkdir()
        (tmp_path / name.partition(".")[0] / name).symlink_to(directories["jsonl"] / target)
        with refusal("split", value=f"{name} leads out"):
            open_it(tmp_path / name.partition(".")[0])
    for filename in ("../train/data-00000-of-00001.arrow", str(directories["alone"] / "data-00000-of-00001.arrow")):
        (tmp_path / "saved").mkdir(exist_ok=True)
        (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": filename}]}))
        with refusal("split", value=f"{filename}' is not a file name"):
            open_it(tmp_path / "saved")
    (tmp_path / "linked").symlink_to(directories["jsonl"])  # the directory itself may be a link
    assert open_it(tmp_path / "linked") == 7


def test_a_column_of_images_or_sounds_by_path_opens_no_file(tmp_path, context):
    rows = datasets.Dataset.from_list([{**ROWS[0], "image": {"path": "/etc/passwd", "bytes": None}}])
    rows.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "train.parquet"))
    data = HubPrompts(dataset=str(tmp_path), keep_columns=("image",), **GSM8K).build(context).train
    assert data.collate([0]).non_tensor_batch["image"].tolist() == [{"path": "/etc/passwd"}]


@pytest.mark.parametrize(
    ("file", "split", "name", "is_there"),
    [
        ("data/train-00000-of-00002.parquet", "train", None, True),
        ("main/test-00000-of-00001.parquet", "test", "main", True),
        ("questions.parquet", "train", None, True), ("questions.parquet", "test", None, False),
        ("dev.parquet", "validation", None, True), ("val/a.parquet", "dev", None, True),
        ("my_test.parquet", "train", None, False),
        ("constraints.parquet", "test", None, False), ("level3-00000-of-00001.parquet", "level3", None, True),
    ],
)  # fmt: skip
def test_the_files_of_a_split_are_found_by_their_names(file, split, name, is_there, tmp_path, context):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / file))
    source = HubPrompts(dataset=str(tmp_path), split=split, name=name, **GSM8K)
    if is_there:
        assert len(source.build(context).train) == 7
    else:
        with refusal("split", value=Path(file).name):
            source.build(context)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The requests of a hub for one data set, at one commit."""

    files: dict[str, bytes]

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/datasets/openai/gsm8k/tree/"):
            inside = path.partition("/tree/")[2].partition("/")[2]
            listed = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                      for name, data in self.files.items() if name.startswith(inside)]  # fmt: skip
            self.answer(json.dumps(listed).encode())
        elif path.startswith("/api/datasets/openai/gsm8k/paths-info/"):
            self.answer(b"[]")
        elif path.startswith("/api/datasets/openai/gsm8k"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(json.dumps({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        elif path.startswith("/datasets/openai/gsm8k/resolve/") and (name := path.split("/", 6)[-1]) in self.files:
            self.answer(self.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_POST = do_GET

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": len(body), "ETag": '"1"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


PROGRAM = """
import json, sys
from verl.component import BuildContext
from verl.data.hub import HubPrompts
from verl.models.tiny import TinyModel
source = HubPrompts(dataset="openai/gsm8k", **json.loads(sys.argv[1]))
splits = source.build(BuildContext(tokenizer=TinyModel().load_tokenizer()))
print(json.dumps([len(splits.train), splits.train[1]["answer"], dict(splits.settled)]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("streaming", [True, False])
def test_a_branch_of_a_hub_is_read_at_the_commit_that_is_recorded(streaming, tmp_path):
    FakeHub.files = {"train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    settings = json.dumps({**GSM8K, "revision": "main", "streaming": streaming})
    done = subprocess.run([sys.executable, "-c", PROGRAM, settings], env=env, capture_output=True, text=True)
    server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [7, "2", {"revision": COMMIT}]


def test_without_a_network_the_fault_says_what_to_set(monkeypatch, context):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refusal("dataset", value="openai/gsm8k", varies=True):
        HubPrompts(dataset="openai/gsm8k", **GSM8K).build(context)


@pytest.mark.exhaustive
def test_the_recipe_for_gsm8k_trains_a_local_model_on_a_local_copy_and_goes_on(directories, dir32, tmp_path):
    words = [
        "experiment=gsm8k_qwen2_5_0_5b", f"actor.model.path={dir32}", f"data.dataset={directories['jsonl']}",
        "data.name=null", "data.instruction=null", "data.max_prompt_length=40", "rollout.max_new_tokens=8",
        "trainer.prompts_per_step=2", "trainer.group_size=2", "trainer.total_steps=2", "trainer.num_threads=1",
        "trainer.eval_before=false", "tracker=none", f"checkpoint.save_dir={tmp_path / 'saved'}",
    ]  # fmt: skip

    def fit(name: str, *more: str):
        arguments, assigned = command_line("ppo", [*words, *more])
        run = validate(compose_root("ppo", arguments), assigned.faults)
        with run.build(BuildContext(run_dir=tmp_path / name)) as trainer:
            return trainer.fit()

    first = fit("first", "trainer.stop_after=1")
    assert (first.status, first.steps) == ("stopped", 1)
    assert fit("second", "resume=latest").steps == 2
    state = json.loads((tmp_path / "saved/global_step_2/trainer_state.json").read_text())
    assert set(state["identity"]["data.dataset"]) == {"blake3"}


def test_a_line_that_is_skipped_moves_no_other_row(tmp_path, context):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.jsonl"
    file.write_text('{"question": "1+1="}\n{broken\n{"question": null}\n{"question": "2+2=", "level": 3}\n')
    rows = HubPrompts(
        dataset=str(tmp_path), prompt="question", keep_columns=("level",), on_bad_row="skip", as_chat=False
    )
    train = rows.build(context).train
    assert [train[index]["prompt_ids"] for index in range(2)] == [0, 3]
    assert train[1]["level"] == 3
    with refusal("dataset[0]", "prompt", value=f"line 3 of {file}", varies=True):
        dataclasses.replace(rows, on_bad_row="error").build(context)
    file.write_text('[{"question": "1+1="}]')
    with refusal("dataset[0]", value="line 1", varies=True):
        dataclasses.replace(rows, on_bad_row="error").build(context)
