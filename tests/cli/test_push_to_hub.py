"""An export reaches a hub: huggingface_hub talks to a server on this machine."""

import threading
from functools import partial
from pathlib import Path

import pytest
from cli import test_checkpoint
from cli.hub_server import TOKEN, Hub


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the server stores by LFS
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


directory, export = test_checkpoint.directory, partial(test_checkpoint.run, "export")


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_pushed_is_what_was_exported_and_private(hub, directory, tmp_path):
    status, told, said = export(directory, tmp_path / "model", "--push", "me/model")
    assert status == 0, said
    assert f"is on the hub: {hub.url}/me/model/commit/" in told
    assert hub.private == {"me/model": True}
    assert {name: data for name, data in hub.files["me/model"].items() if name != ".gitattributes"} == stored(
        tmp_path / "model"
    )
    assert {"config.json", "model.safetensors"} <= hub.files["me/model"].keys()
    # into the same repository again, by the name alone
    assert export(directory, tmp_path / "again", "--push", "model")[0] == 0
    assert export(directory, tmp_path / "open", "--push", "me/open", "--public")[0] == 0
    assert hub.private == {"me/model": True, "me/open": False}


def refused(kind: str, hub: Hub, monkeypatch) -> tuple[str, str]:
    """Arrange a fault; the repository, and what is said."""
    match kind:
        case "no token":
            monkeypatch.delenv("HF_TOKEN")
            monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
            return "me/model", "Set HF_TOKEN to a token that may write to me/model"
        case "bad token":
            monkeypatch.setenv("HF_TOKEN", "hf_wrong")
            return "me/model", "refuses: Invalid username or password. Set HF_TOKEN"
        case "of others":
            return "others/model", "You don't have the rights to create a model under others/model"
        case "no name":
            return "a/b/c", "Repo id must be in the form"
        case "public":
            hub.private["me/model"] = False
            return "me/model", "this repository is public. Add --public"
        case _:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
            return "me/model", "http://127.0.0.1:9 fails: ConnectError"


@pytest.mark.first_rows(3)
@pytest.mark.parametrize("kind", ["no token", "bad token", "of others", "no name", "public", "network down"])
def test_a_hub_that_refuses_is_one_line_before_anything_is_written(kind, hub, directory, tmp_path, monkeypatch):
    repository, problem = refused(kind, hub, monkeypatch)
    status, told, said = export(directory, tmp_path / "model", "--push", repository)
    assert (status, told, said.count("\n")) == (2, "", 1)
    assert problem in said
    assert not (tmp_path / "model").exists()
    assert hub.files == {}
    assert TOKEN not in said


@pytest.mark.parametrize("part", ["/commit/", pytest.param("/lfs/", marks=pytest.mark.exhaustive)])  # it tries often
def test_an_upload_that_fails_leaves_the_export_and_says_how_to_go_on(part, hub, directory, tmp_path):
    hub.fails_at = part
    status, told, said = export(directory, tmp_path / "model", "--push", "me/model")
    assert status == 2
    assert "is in" in told
    assert said.splitlines()[-1].startswith(f"error: --push is 'me/model': {hub.url}")
    assert said.endswith(f"to try again: hf upload me/model {tmp_path / 'model'}\n")
    assert {"config.json", "model.safetensors"} == set(stored(tmp_path / "model"))
    assert hub.files == {}


def test_nothing_is_created_on_the_hub_for_a_checkpoint_that_is_none(hub, tmp_path):
    assert export(tmp_path / "nowhere", tmp_path / "model", "--push", "me/model")[0] == 2
    assert hub.private == {}
