"""The training service: sessions of clients, their models and samplers, and saved weights below one directory.

    DIRECTORY/MODEL_ID/weights/NAME              saved sessions, to continue from
                       sampler_weights/NAME      adapters to sample from
                       external_weights/NAME     adapters to download

`tinker://MODEL_ID/weights/NAME` is the address of the first. What a client has not saved ends with the service.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.service import saved
from verl.service.adapters import BASE, AdapterShape, BaseModel
from verl.service.data import checked_tokens
from verl.service.jobs import Job, Jobs
from verl.service.sampling import (
    UNKNOWN_ROOM,
    PromptRequest,
    Sample,
    SamplingOptions,
    TokenScores,
    sample,
    token_scores,
)
from verl.service.session import TrainingSession
from verl.service.wire import sample_response
from verl.tracking.jsonl import plain
from verl.utils.directories import TemporaryDirectory
from verl.utils.external_input import ExternalInputError, checked_name
from verl.utils.seeding import derive_seed

_log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 600.0  # without a sign of life of a client, which sends one every 10 s
MAX_MODELS = 64
RESIDENT_SAMPLERS = 8  # adapters in memory that are sampled from; others are read from disk when they are asked for
KEPT_SNAPSHOTS = 64  # of each model
MOST_SAMPLES = 1024  # of one request
MOST_SCORES = 2**24  # log-probs of one request
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
SCHEME = "tinker://"


class NotFound(ConfigError):
    """There is no such session, model, sampler, checkpoint or request."""


@dataclass
class Client:
    """A session of a client."""

    seen_at: float
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class Model:
    """A model in training.

    Attributes:
        failed: why a `forward_backward` since the last step has no gradients.
    """

    session: TrainingSession
    client: str
    begun_at: float = field(default_factory=time.monotonic)
    snapshots: list[Path] = field(default_factory=list)
    failed: str | None = None


@dataclass(frozen=True)
class Sampler:
    """A sampling session, on a saved adapter or on the base model."""

    client: str
    number: int
    directory: Path | None
    address: str | None


@dataclass(frozen=True)
class PendingSample:
    """A prompt, with what is asked for besides its samples.

    Attributes:
        directory: of the adapter to sample from; None for the base model.
        topk_samples, topk_prompt: numbers of likeliest tokens at each place.
        targets: [n K] tokens to score at each place of the prompt after the first, -1 for none; with the rows and
            columns of `layout`, if they came as a sparse matrix.
        first_scored: number of tokens of the prompt before those with scores.
    """

    prompt: PromptRequest = field(default_factory=lambda: PromptRequest((), 0))
    directory: Path | None = None
    topk_samples: int = 0
    scores_prompt: bool = False
    topk_prompt: int = 0
    targets: Tensor | None = None
    layout: tuple[Tensor, Tensor] | None = None
    first_scored: int = 1

    @property
    def scores(self) -> bool:
        """Whether log-probs of the prompt are asked for."""
        return self.scores_prompt or self.topk_prompt > 0 or self.targets is not None


def _name(name: str) -> str:
    try:
        return checked_name(name)
    except ExternalInputError as error:
        raise ConfigError(f"path: {error}.") from error


def run_of(directory: Path) -> str:
    """The id of the model of a `run_directory`."""
    return directory.name.replace("-train-", ":train:")


class TrainingService:
    """Models in training and samplers on one base model, for several clients.

    Args:
        base: the model.
        names: under which clients may ask for it; the first is told to them.
        directory: of saved weights.
        seed: of adapters and samples for which a client gives none.
        joins: see `Jobs`.
    """

    def __init__(self, base: BaseModel, names: Sequence[str], directory: Path, seed: int = 0, joins: bool = True):
        self.base, self.names, self.directory, self.seed = base, list(names), directory, seed
        self.clients: dict[str, Client] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.tokenizer_directory = directory / "tokenizer"  # a model's own may be in a file that clients cannot read
        base.tokenizer.save_pretrained(self.tokenizer_directory)
        self._scratch = TemporaryDirectory("verl-service-")
        self._resident: dict[Path, tuple[str, AdapterShape]] = {}  # frozen adapters; the last one was used last
        self._lock, self._state = threading.RLock(), threading.RLock()
        self._recover()
        self.jobs = Jobs(self._sample_batch, joins)

    # Clients

    def create_client(self) -> str:
        name = uuid.uuid4().hex
        with self._state:
            self.clients[name] = Client(time.monotonic())
        return name

    def client(self, name: str) -> Client:
        """A session, which has shown a sign of life.

        Raises:
            NotFound: it has ended.
        """
        with self._state:
            if (client := self.clients.get(name)) is None:
                raise NotFound(f"there is no session {name[:80]!r}: it has ended, or the service was started again.")
            client.seen_at = time.monotonic()
            return client

    def end_client(self, name: str) -> None:
        """End a session: its models, samplers and unsaved snapshots are freed."""
        with self._state:
            client = self.clients.pop(name, None)
            if client is None:
                return
            models = [model for x in client.models if (model := self.models.pop(x, None)) is not None]
            for x in client.samplers:
                self.samplers.pop(x, None)
        self.jobs.forget(name)

        def free() -> None:
            for model in models:
                for path in model.snapshots:
                    self._drop(path)
                model.session.close()

        self.jobs.run_now(free)

    def sweep(self) -> None:
        """End sessions whose clients have gone, and drop old results."""
        with self._state:
            gone = [n for n, x in self.clients.items() if x.seen_at < time.monotonic() - SESSION_TIMEOUT_S]
        for name in gone:
            self.end_client(name)
        self.jobs.sweep()

    def close(self) -> None:
        for name in [*self.clients]:
            self.end_client(name)
        self.jobs.close()
        self.base.close()
        self._scratch.cleanup()

    # Models

    def model(self, name: str) -> Model:
        with self._state:
            if (model := self.models.get(name)) is None:
                raise NotFound(
                    f"there is no model {name[:80]!r}: its session has ended, or the service was started again."
                )
            self.client(model.client)
            return model

    def check_base(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ConfigError(f"base_model is {name[:200]!r}: this service has {', '.join(self.names)}.")

    def create_model(self, client: str, number: int, shape: AdapterShape) -> str:
        """Queue a new adapter; returns the id of its model, which is that of the request too."""
        self.client(client)
        name = self._model_id(client, number)

        def work() -> dict[str, Any]:
            self._add_model(name, client, number, shape)
            return {"model_id": name, "type": "create_model"}

        return self.jobs.add(name, Job(client, work))

    def create_model_from(self, client: str, number: int, address: str, optimizer: bool) -> str:
        """Queue a new model with saved weights; returns the id of the request."""
        self.client(client)
        name, directory = self._model_id(client, number), self.saved_at(address)

        def work() -> dict[str, Any]:
            shape = saved.read(directory).shape
            model = self._add_model(name, client, number, shape)
            try:
                model.session.load(directory, optimizer)
            except BaseException:
                with self._state:
                    self.models.pop(name, None)
                model.session.close()
                raise
            return {"path": address, "model_id": name, "type": "load_weights"}

        return self.jobs.add(name, Job(client, work))

    def _model_id(self, client: str, number: int) -> str:
        return f"{client}:train:{number}"  # which the SDK makes too

    def _add_model(self, name: str, client: str, number: int, shape: AdapterShape) -> Model:
        with self._state:
            owner = self.client(client)
            if (former := self.models.get(name)) is not None:  # the client repeats a request of a while ago
                return former
            if len(self.models) >= MAX_MODELS:
                raise ConfigError(f"{MAX_MODELS} models are in training: end a session first.")
        session = TrainingSession.on(self.base, shape, derive_seed(self.seed, "model", number), self._lock)
        model = Model(session, client)
        with self._state:
            if self.clients.get(client) is owner:
                self.models[name] = model
                owner.models.append(name)
                return model
        session.close()
        raise NotFound(f"the session {client[:80]!r} has ended.")

    def in_order(self, name: str, number: int | None, work: Callable[[Model], Any]) -> str:
        """Queue a request of a model; returns its id."""
        if not number:
            raise ConfigError("seq_id is missing: requests of a model are numbered from 1.")
        model = self.model(name)
        return self.jobs.add(f"{name}:{number}", Job(model.client, lambda: work(model)), name, number)

    def note(self, name: str, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step to `metrics.jsonl` of a model, of which `verl report` and `verl watch` make
        curves."""
        model, directory = self.model(name), self.run_directory(name)
        line = {"step": model.session.updates, "time_s": round(time.monotonic() - model.begun_at, 3)}
        line |= {f"actor/{key}": x for key, x in metrics.items()}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(plain(line)) + "\n")
        except OSError as error:  # the step was made
            _log.warning("%s cannot be written: %s.", directory / "metrics.jsonl", error.strerror)

    # Saved weights

    def save(self, name: str, kind: str, path: str, *, overwrites: bool = False) -> str:
        """Save a model under a name, and return its address. Called by a job.

        Args:
            kind: a key of `KINDS`.
            overwrites: one of the same name goes when the new one is whole.
        """
        directory = self.run_directory(name) / kind / _name(path)
        new, old = (directory.with_name(f".{path}.{word}") for word in ("new", "old"))
        if not (overwrites and directory.is_dir()):
            self._write(self.model(name), directory, has_optimizer=kind == "weights")
        else:  # `_recover` brings back the old one, if this process is killed between the renames
            shutil.rmtree(new, ignore_errors=True)
            self._write(self.model(name), new, has_optimizer=kind == "weights")
            directory.rename(old)
            new.rename(directory)
            self._forget(directory)
            shutil.rmtree(old, ignore_errors=True)
        return f"{SCHEME}{name}/{kind}/{path}"

    def _recover(self) -> None:
        """Finish what a killed service has begun to overwrite."""
        for old in self.directory.glob("*-train-*/*/.*.old"):
            directory = old.with_name(old.name[1 : -len(".old")])
            shutil.rmtree(old, ignore_errors=True) if directory.is_dir() else old.rename(directory)
        for new in self.directory.glob("*-train-*/*/.*.new"):
            shutil.rmtree(new, ignore_errors=True)

    def snapshot(self, name: str, number: int) -> str:
        """Save a model for sampling until its session ends; returns the id of a sampling session. Called by a job.

        Args:
            number: of the sampling session.
        """
        model = self.model(name)
        directory = Path(self._scratch.name) / uuid.uuid4().hex
        self._write(model, directory, has_optimizer=False)
        model.snapshots.append(directory)
        while len(model.snapshots) > KEPT_SNAPSHOTS:
            self._drop(model.snapshots.pop(0))
        return self.create_sampler(model.client, number, None, directory)

    def _write(self, model: Model, directory: Path, has_optimizer: bool) -> None:
        session = model.session
        if has_optimizer:
            session.save(directory)
            return
        state = saved.SavedSession(session.shape, session.weights(), {}, session.updates, 0, self.base.digest)
        saved.write(state, directory, self.base, session.name, optimizer=False)

    def runs(self) -> list[Path]:
        """Directories of models with saved weights."""
        return sorted(self.directory.glob("*-train-*"))

    def run_directory(self, name: str) -> Path:
        """The directory of a model: its id, without what is not in names of files."""
        return self.directory / _name(name.replace(":train:", "-train-"))

    def saved_at(self, address: str) -> Path:
        """The directory of saved weights.

        Raises:
            NotFound: there are none at the address.
            ConfigError: it is no address.
        """
        parts = address.removeprefix(SCHEME).split("/")
        if not address.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise ConfigError(f"path is {address[:200]!r}: expected {SCHEME}MODEL_ID/weights/NAME.")
        directory = self.run_directory(parts[0]) / parts[1] / _name(parts[2])
        if not (directory / saved.RECORD).is_file():
            raise NotFound(f"path is {address[:200]!r}: there is no such checkpoint.")
        return directory

    def checkpoints(self, name: str | None = None) -> list[dict[str, Any]]:
        """The named checkpoints of a model, or of all, oldest first, in the form of the SDK."""
        found = []
        top = self.runs() if name is None else [self.run_directory(name)]
        for record in [file for run in top for file in run.glob(f"*/*/{saved.RECORD}")]:
            directory, kind = record.parent, record.parent.parent.name
            if kind not in KINDS or directory.name.startswith("."):
                continue
            try:
                moment = datetime.datetime.fromtimestamp(record.stat().st_mtime, datetime.UTC)
                num_bytes = sum(file.stat().st_size for file in directory.iterdir())
            except FileNotFoundError:  # it is being removed
                continue
            found.append(
                {
                    "checkpoint_id": f"{kind}/{directory.name}",
                    "checkpoint_type": KINDS[kind],
                    "time": moment.isoformat(),
                    "tinker_path": f"{SCHEME}{run_of(directory.parents[1])}/{kind}/{directory.name}",
                    "size_bytes": num_bytes,
                }
            )
        return sorted(found, key=lambda x: (x["time"], x["tinker_path"]))

    def delete(self, address: str) -> None:
        directory = self.saved_at(address)
        self.jobs.run_now(lambda: self._drop(directory))

    def _drop(self, directory: Path) -> None:
        """Remove saved weights, in the thread that computes."""
        self._forget(directory)
        shutil.rmtree(directory, ignore_errors=True)

    def _forget(self, directory: Path) -> None:
        if (found := self._resident.pop(directory, None)) is not None:
            self.base.remove(found[0])

    # Samples

    def create_sampler(self, client: str, number: int, address: str | None, directory: Path | None = None) -> str:
        """A sampling session on a saved adapter, or on the base model; returns its id."""
        owner, name = self.client(client), f"{client}:sample:{number}"
        directory = directory if address is None else self.saved_at(address)
        with self._state:
            self.samplers[name] = Sampler(client, number, directory, address)
            owner.samplers.append(name)
        return name

    def sampler(self, name: str) -> Sampler:
        with self._state:
            if (sampler := self.samplers.get(name)) is None:
                raise NotFound(f"there is no sampling session {name[:80]!r}: its session has ended.")
            self.client(sampler.client)
            return sampler

    def sample(
        self, sampler_id: str, number: int, tokens: Sequence[int], count: int, options: SamplingOptions,
        seed: int | None, further: PendingSample,
    ) -> str:  # fmt: skip
        """Queue a sample request; returns its id.

        Args:
            further: what is asked for besides samples.
        Raises:
            ConfigError: a value is out of its range.
            Busy: too many wait.
        """
        sampler = self.sampler(sampler_id)
        if not 1 <= count <= MOST_SAMPLES:
            raise ConfigError(f"num_samples is {count}: must lie between 1 and {MOST_SAMPLES}.")
        chosen = options.checked("sampling_params", self.base.vocabulary)
        checked_tokens(tokens, "prompt", self.base.vocabulary, self.base.longest)
        asked = len(tokens) * (further.topk_prompt + (0 if further.targets is None else further.targets.shape[-1]))
        longest = self.base.longest or UNKNOWN_ROOM
        asked += count * min(chosen.max_new_tokens or longest, longest) * further.topk_samples
        if asked > MOST_SCORES:
            raise ConfigError(
                f"the request asks for {asked} log-probs: at most {MOST_SCORES} are given. Ask for fewer."
            )
        if self.base.longest is not None and len(tokens) >= self.base.longest and not further.scores:
            raise ConfigError(
                f"prompt has {len(tokens)} tokens: the model reads {self.base.longest}, which leaves no response."
            )
        noise = (seed,) if seed is not None else (self.seed, sampler.number, number)
        prompt, directory = PromptRequest(tokens, count, noise), sampler.directory
        request = dataclasses.replace(further, prompt=prompt, directory=directory)
        kind = chosen if self.base.mixes else (directory, chosen)
        job = Job(sampler.client, None, kind, request, count, is_sample=True)
        return self.jobs.add(f"{sampler_id}:{number}", job)

    def _sample_batch(self, kind: Hashable, requests: Sequence[PendingSample]) -> list[Any]:
        """Samples of requests of one kind, in the thread that computes; those of up to `RESIDENT_SAMPLERS` adapters are
        one batch."""
        options: Any = kind if isinstance(kind, SamplingOptions) else kind[1]  # type: ignore[index]
        directories = list(dict.fromkeys(request.directory for request in requests))
        if len(directories) > RESIDENT_SAMPLERS:
            of_first = {*directories[:RESIDENT_SAMPLERS]}
            parts = [[r for r in requests if (r.directory in of_first) is is_first] for is_first in (True, False)]
            found = {id(r): x for part in parts for r, x in zip(part, self._sample_batch(kind, part), strict=True)}
            return [found[id(request)] for request in requests]
        with self._lock:
            names = {directory: self._resident_adapter(directory) for directory in directories}
            with self.base.sampling_from(*names.values()) as engine:
                prompts = [request.prompt for request in requests]
                if len(names) > 1:
                    prompts = [
                        dataclasses.replace(request.prompt, weights=names[request.directory] or BASE)
                        for request in requests
                    ]
                samples = sample(engine, self.base.tokenizer, prompts, options, self.base.longest, may_be_full=True)
            answers = []
            for request, found in zip(requests, samples, strict=True):
                with self.base.sampling_from(names[request.directory]):
                    answers.append(self._answer(request, found))
            return answers

    def _answer(self, request: PendingSample, samples: list[Sample]) -> bytes:
        """Samples, with the scores that the request asks for, as they are sent."""
        engine, head, prompt = self.base.scorer, self.base.head, [*request.prompt.tokens]
        of_samples: list[TokenScores | None] = [None] * len(samples)
        if k := request.topk_samples:
            for index, one in enumerate(samples):
                scores = token_scores(engine, head, prompt + one.tokens, k)
                at = slice(len(prompt) - 1, None)
                assert scores.likeliest is not None
                assert scores.of_likeliest is not None
                of_samples[index] = dataclasses.replace(
                    scores, log_probs=scores.log_probs[at], likeliest=scores.likeliest[at],
                    of_likeliest=scores.of_likeliest[at],
                )  # fmt: skip
        of_prompt = None
        if request.scores and len(prompt) > 1:
            of_prompt = token_scores(engine, head, prompt, request.topk_prompt, request.targets)
        elif request.scores:
            of_prompt = TokenScores(torch.zeros(0))
        wants = {
            "logprobs": request.scores_prompt,
            "topk": request.topk_prompt > 0,
            "targets": request.targets is not None,
        }
        return sample_response(samples, of_samples, of_prompt, request.first_scored, wants, request.layout)

    def _resident_adapter(self, directory: Path | None) -> str | None:
        """The name of the frozen adapter of a directory, read if it is not in memory; None for the base model."""
        if directory is None:
            return None
        if (found := self._resident.pop(directory, None)) is None:
            if not directory.is_dir():
                raise ConfigError(
                    f"the weights of this sampler are gone: a model keeps its last {KEPT_SNAPSHOTS} snapshots without "
                    "a name, and others until they are deleted."
                )
            found = self._made_resident(saved.read(directory))
        self._resident[directory] = found
        return found[0]

    def _made_resident(self, state: saved.SavedSession) -> tuple[str, AdapterShape]:
        """A frozen adapter with these weights: the one that was not used for longest, or a new one."""
        shape = dataclasses.replace(state.shape, seed=0)
        if len(self._resident) >= RESIDENT_SAMPLERS:
            oldest = next(iter(self._resident))
            name, of_oldest = self._resident[oldest]
            if of_oldest == shape:  # peft takes far longer to make one
                self.base.set_weights(name, state.weights)
            del self._resident[oldest]
            if of_oldest == shape:
                return name, shape
            self.base.remove(name)
        name = f"sampler_{uuid.uuid4().hex[:12]}"
        self.base.add_frozen(name, shape, state.weights)
        return name, shape
