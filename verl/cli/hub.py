"""The upload of an exported model to the Hugging Face hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, StorageRefused, StorageUnreachable


def create_repository(name: str, public: bool = False) -> str:
    """Create a model repository of the Hugging Face hub if there is none, and return its name with the owner.

    Raises:
        ConfigError: the repository exists and is public, and `public` is false.
        StorageRefused: the token is missing, wrong, or may not write there.
        StorageUnreachable: the hub does not answer, or the name is invalid.
    """
    with _hub(name) as api:
        repository = api.create_repo(name, private=not public, exist_ok=True).repo_id
        is_allowed = public or api.model_info(repository).private
    if not is_allowed:
        raise ConfigError(f"--push is {name!r}: this repository is public. Add --public, or name another one.")
    return repository


def upload(repository: str, directory: Path) -> str:
    """Upload the files of a directory as one commit, and return its address. Raises: see `create_repository`."""
    hint = f" The export in {directory} is complete; to try again: hf upload {repository} {directory}"
    with _hub(repository, hint) as api:
        return api.upload_folder(repo_id=repository, folder_path=directory).commit_url


@contextlib.contextmanager
def _hub(name: str, hint: str = "") -> Iterator[Any]:
    """The client of the hub; its errors are raised as ours."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        yield api
    except Exception as error:  # of the transport of the client too, which differs between versions
        where, said = f"--push is {name!r}: {api.endpoint}", str(error).strip().splitlines()[-1:]
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            todo = f"Set HF_TOKEN to a token that may write to {name}, or use hf auth login."
            raise StorageRefused(f"{where} refuses: {''.join(said)} {todo}{hint}") from error
        raise StorageUnreachable(f"{where} fails: {type(error).__name__} {''.join(said)}.{hint}") from error
