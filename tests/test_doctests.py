"""Every example in a docstring of the package runs and gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch
from golden_run import golden_run

import verl
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.save.snapshot import SavedComponent
from verl.engines.optimizer import AdamW

PACKAGE = Path(verl.__file__).parent
WITH_EXAMPLES = sorted(
    str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text()
)
OF_OTHER_MODULES = (CheckpointManager, CheckpointReader, CheckpointStore, FileSystem, Path, SavedComponent, AdamW)


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_examples_in_docstrings_give_what_they_say(path, tmp_path, monkeypatch):
    """In a directory with two checkpoints, and with the names of other modules that examples use."""
    golden_run(tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("checkpoints")
    checkpoint = store.newest()
    names = {"torch": torch, "store": store, "checkpoint": checkpoint, "disk": FileSystem()}
    names |= {kind.__name__: kind for kind in OF_OTHER_MODULES}
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(module, extraglobs=names, optionflags=options)
    assert found.attempted > 0, "an example is in no docstring that doctest finds"
    assert found.failed == 0
