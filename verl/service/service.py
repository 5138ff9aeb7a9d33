"""The training service: sessions of clients, their models and samplers, and saved weights below one directory.

    DIRECTORY/MODEL_ID/weights/NAME              saved sessions, to continue from
                       sampler_weights/NAME      adapters to sample from
                       external_weights/NAME     adapters to download

`tinker://MODEL_ID/weights/NAME` is the address of the first. A NAME is a link to a hidden directory, so that what it
means changes at once when it is saved again. What a client has not saved ends with the service.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinker import types
from torch import Tensor

from verl.errors import ConfigError, faults_below
from verl.service import saved
from verl.service.adapters import BASE, AdapterShape, BaseModel
from verl.service.data import TARGETS, Datum, checked_tokens, loss_rows
from verl.service.jobs import MAX_ADAPTERS, Job, Jobs
from verl.service.losses import LOSSES
from verl.service.sampling import UNKNOWN_ROOM, PromptRequest, Sample, SamplingOptions, sample, token_scores
from verl.service.session import TrainingSession
from verl.service.wire import sample_response
from verl.utils.directories import TemporaryDirectory
from verl.utils.external_input import checked_name, plain
from verl.utils.seeding import derive_seed

_log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 600.0  # without a sign of life of a client, which sends one every 10 s
MAX_MODELS = 64
RESIDENT_SAMPLERS = MAX_ADAPTERS  # adapters in memory that are sampled from; others are read from disk when needed
KEPT_SNAPSHOTS = 64  # of each model
MOST_SAMPLES = 1024  # of one request
MOST_SCORES = 2**24  # log-probs of one request


class NotFound(ConfigError):
    """There is no such session, model, sampler, checkpoint or request."""

    status = 404


@dataclass
class Model:
    """A model in training.

    Attributes:
        failed: why a `forward_backward` since the last step has no gradients.
    """

    name: str
    session: TrainingSession
    begun_at: float = field(default_factory=time.monotonic)
    snapshots: list[Path] = field(default_factory=list)
    failed: str | None = None


@dataclass(frozen=True)
class Sampler:
    """A sampling session, on a saved adapter or on the base model."""

    number: int
    directory: Path | None
    address: str | None


@dataclass
class Client:
    """A session of a client, with its models and samplers by name: ID:train:NUMBER, ID:sample:NUMBER."""

    seen_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleWork:
    """A sample request, with the directory of its adapter (None for the base model) and the name of its noise."""

    request: types.SampleRequest
    options: SamplingOptions
    directory: Path | None
    noise: tuple[object, ...]


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
        self.tokenizer_directory = directory / "tokenizer"  # a model's own may be in a file that clients cannot read
        base.tokenizer.save_pretrained(self.tokenizer_directory)
        self._scratch = TemporaryDirectory("verl-service-")
        self._resident: dict[Path, tuple[str, AdapterShape]] = {}  # frozen adapters; the last one was used last
        self.jobs = Jobs(self._sample_batch, joins)

    # Clients

    def create_client(self) -> str:
        name = uuid.uuid4().hex
        self.clients[name] = Client()
        return name

    def client(self, name: str) -> Client:
        """A session, or that of a model or sampler; it has shown a sign of life.

        Raises:
            NotFound: it has ended.
        """
        if (client := self.clients.get(name.partition(":")[0])) is None:
            raise NotFound(f"there is no session {name[:80]!r}: it has ended, or the service was started again.")
        client.seen_at = time.monotonic()
        return client

    def model(self, name: str) -> Model:
        if (model := self.client(name).models.get(name)) is None:
            raise NotFound(f"there is no model {name[:80]!r}: create it first.")
        return model

    def sampler(self, name: str) -> Sampler:
        if (sampler := self.client(name).samplers.get(name)) is None:
            raise NotFound(f"there is no sampling session {name[:80]!r}: create it first.")
        return sampler

    def end_client(self, name: str) -> None:
        """End a session: its models, samplers and unsaved snapshots are freed."""
        if (client := self.clients.pop(name, None)) is None:
            return
        self.jobs.forget(name)

        def free() -> None:
            for model in client.models.values():
                for path in model.snapshots:
                    self._drop(path)
                model.session.close()

        self.jobs.run_now(free)

    def sweep(self) -> None:
        """End sessions whose clients have gone, and drop old results."""
        for name, client in [*self.clients.items()]:
            if client.seen_at < time.monotonic() - SESSION_TIMEOUT_S:
                self.end_client(name)
        self.jobs.sweep()

    def close(self) -> None:
        for name in [*self.clients]:
            self.end_client(name)
        self.jobs.close()
        self.base.close()
        self._scratch.cleanup()

    # Models

    def check_base(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ConfigError(f"base_model is {name[:200]!r}: this service has {', '.join(self.names)}.")

    def create_model(
        self, client_id: str, number: int, shape: AdapterShape | None, address: str = "", optimizer: bool = False
    ) -> str:
        """Queue a new model; returns the id of the request, which is that of the model too.

        Args:
            shape: of a new adapter; None for the saved one at `address`.
            optimizer: whether to load the saved optimizer.
        """
        client, name = self.client(client_id), f"{client_id}:train:{number}"  # which the SDK makes too
        directory = self.saved_at(address) if shape is None else None

        def work() -> dict[str, Any]:
            if name not in client.models:  # else the client repeats a request of a while ago
                self._add_model(client_id, name, shape, directory, optimizer)
            return {"model_id": name, "path": address, "type": "load_weights" if directory else "create_model"}

        return self.jobs.submit(name, client_id, work)

    def _add_model(
        self, client_id: str, name: str, shape: AdapterShape | None, directory: Path | None, optimizer: bool
    ) -> None:
        if sum(len(client.models) for client in [*self.clients.values()]) >= MAX_MODELS:
            raise ConfigError(f"{MAX_MODELS} models are in training: end a session first.")
        if directory is not None:
            shape = saved.read_record(directory).adapter
        assert shape is not None
        session = TrainingSession.on(self.base, shape, derive_seed(self.seed, "model", name.rpartition(":")[2]))
        try:
            if directory is not None:
                session.load(directory, optimizer)
            self.client(client_id).models[name] = Model(name, session)
        except BaseException:
            session.close()
            raise

    def in_order(self, name: str, number: int | None, work: Callable[[Model], Any]) -> str:
        """Queue a request of a model; returns its id. Clients send those of a model one after another, numbered."""
        if not number:
            raise ConfigError("seq_id is missing: requests of a model are numbered from 1.")
        model = self.model(name)
        return self.jobs.submit(f"{name}:{number}", name.partition(":")[0], lambda: work(model))

    def note(self, model: Model, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step to `metrics.jsonl` of a model, of which `verl report` and `verl watch` make
        curves."""
        file = self.run_directory(model.name) / "metrics.jsonl"
        line = {"step": model.session.updates, "time_s": round(time.monotonic() - model.begun_at, 3)}
        line |= {f"actor/{key}": x for key, x in metrics.items()}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps(plain(line)) + "\n")
        except OSError as error:  # the step was made
            _log.warning("%s cannot be written: %s.", file, error.strerror)

    # Saved weights

    def save(self, model: Model, kind: str, name: str, overwrites: bool = False) -> str:
        """Save a model under a name, and return its address. Called by a job.

        Args:
            kind: weights, which training can continue from, sampler_weights or external_weights.
            overwrites: whether the name may be in use; what it meant is then removed.
        """
        link = self.run_directory(model.name) / kind / checked_name(name)
        if link.exists() and not overwrites:
            raise ConfigError(f"path is {name!r}: there is something already. Give another name.")
        former, directory = link.resolve(), link.with_name(f".{uuid.uuid4().hex}")
        model.session.save(directory, optimizer=kind == "weights")
        new = directory.with_suffix(".link")
        new.symlink_to(directory.name)
        new.replace(link)
        if former != link:
            self._drop(former)
        return f"tinker://{model.name}/{kind}/{name}"

    def snapshot(self, model: Model, number: int) -> str:
        """Save a model for sampling until its session ends; returns the id of a sampling session. Called by a job.

        Args:
            number: of the sampling session.
        """
        directory = Path(self._scratch.name) / uuid.uuid4().hex
        model.session.save(directory, optimizer=False)
        model.snapshots.append(directory)
        while len(model.snapshots) > KEPT_SNAPSHOTS:
            self._drop(model.snapshots.pop(0))
        return self._add_sampler(model.name.partition(":")[0], Sampler(number, directory, None))

    def run_directory(self, name: str) -> Path:
        """The directory of a model: its id, without what is not in names of files."""
        return self.directory / checked_name(name.replace(":train:", "-train-"))

    def saved_at(self, address: str) -> Path:
        """The directory of saved weights.

        Raises:
            ValueError: it is no address.
            NotFound: there are none at the address.
        """
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(address)
        kind, name = parsed.checkpoint_id.split("/")
        directory = self.run_directory(parsed.training_run_id) / kind / checked_name(name)
        if not (directory / saved.RECORD).is_file():
            raise NotFound(f"path is {address[:200]!r}: there is no such checkpoint.")
        return directory.resolve()

    def checkpoints(self, name: str | None = None) -> list[types.Checkpoint]:
        """The named checkpoints of a model, or of all, oldest first."""
        run = "*" if name is None else self.run_directory(name).name
        found = [x for record in self.directory.glob(f"{run}/*/*/{saved.RECORD}") for x in self._checkpoints_at(record)]
        return sorted(found, key=lambda x: (x.time, x.tinker_path))

    def _checkpoints_at(self, record: Path) -> Iterator[types.Checkpoint]:
        run, kind, name = record.parts[-4:-1]
        address = f"tinker://{run.replace('-train-', ':train:')}/{kind}/{name}"
        with contextlib.suppress(ValueError, FileNotFoundError):  # not a checkpoint; it is being removed
            parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(f"tinker://{run}/{kind}/{checked_name(name)}")
            yield types.Checkpoint(
                checkpoint_id=parsed.checkpoint_id, checkpoint_type=parsed.checkpoint_type, tinker_path=address,
                time=datetime.datetime.fromtimestamp(record.stat().st_mtime, datetime.UTC),
                size_bytes=sum(file.stat().st_size for file in record.parent.iterdir()),
            )  # fmt: skip

    def delete(self, address: str) -> None:
        directory = self.saved_at(address)
        run, kind, name = address.removeprefix("tinker://").split("/")
        (self.run_directory(run) / kind / name).unlink()
        self.jobs.run_now(lambda: self._drop(directory))

    def _drop(self, directory: Path) -> None:
        """Remove saved weights, in the thread that computes."""
        if (found := self._resident.pop(directory, None)) is not None:
            self.base.remove(found[0])
        shutil.rmtree(directory, ignore_errors=True)

    # Samples

    def create_sampler(self, client: str, number: int, address: str | None) -> str:
        """A sampling session on a saved adapter, or on the base model; returns its id."""
        return self._add_sampler(client, Sampler(number, None if address is None else self.saved_at(address), address))

    def _add_sampler(self, client: str, sampler: Sampler) -> str:
        name = f"{client}:sample:{sampler.number}"
        self.client(client).samplers[name] = sampler
        return name

    def sample(self, request: types.SampleRequest) -> str:
        """Queue a sample request; returns its id.

        Raises:
            ConfigError: a value is out of its range.
            Busy: too many wait.
        """
        name, params, base = request.sampling_session_id or "", request.sampling_params, self.base
        sampler, tokens, count = self.sampler(name), request.prompt.to_ints(), request.num_samples
        with faults_below("sampling_params"):
            options = SamplingOptions(
                max_new_tokens=params.max_tokens, temperature=params.temperature, top_k=max(params.top_k, 0),
                top_p=params.top_p, stop=params.stop,  # pyright: ignore[reportArgumentType] - a list becomes a tuple
            )  # fmt: skip
        checked_tokens(tokens, "prompt", base.vocabulary, base.longest)
        last, targets = request.prompt_logprobs_last_n, request.target_prompt_logprobs
        width = (targets.shape or [0])[-1] if targets is not None else 0
        longest = base.longest or UNKNOWN_ROOM
        scores = len(tokens) * (request.topk_prompt_logprobs + width)
        scores += count * min(options.max_new_tokens or longest, longest) * request.topk_sample_logprobs
        topk = request.topk_prompt_logprobs, request.topk_sample_logprobs
        for path, value, low, high in (
            ("num_samples", count, 1, MOST_SAMPLES),
            ("prompt_alt_tokens_k", request.prompt_alt_tokens_k, 0, 0),
            ("topk_prompt_logprobs", topk[0], 0, base.vocabulary),
            ("topk_sample_logprobs", topk[1], 0, base.vocabulary),
            ("prompt_logprobs_last_n", 1 if last is None else last, 1, 1 if last is None else len(tokens) - 1),
            ("the number of log-probs that are asked for", scores, 0, MOST_SCORES),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{path} is {value}: must lie between {low} and {high}.")
        if len(tokens) == base.longest and not (request.prompt_logprobs or topk[0] or targets is not None):
            raise ConfigError(f"prompt has {len(tokens)} tokens, as many as the model reads: it leaves no response.")
        noise = (self.seed, sampler.number, request.seq_id) if params.seed is None else (params.seed,)
        work = SampleWork(request, options, sampler.directory, noise)
        kind = options if base.mixes else (sampler.directory, options)
        job = Job(name.partition(":")[0], kind=kind, adapter=sampler.directory, request=work, num_samples=count)
        return self.jobs.submit_sample(f"{name}:{request.seq_id}", job)

    def _sample_batch(self, works: Sequence[SampleWork]) -> list[bytes]:
        """Samples of requests that sample alike, of up to `MAX_ADAPTERS` adapters, in the thread that computes."""
        base = self.base
        names = {directory: self._resident_adapter(directory) for directory in {x.directory: 0 for x in works}}
        prompts = [PromptRequest(x.request.prompt.to_ints(), x.request.num_samples, x.noise) for x in works]
        if len(names) > 1:
            prompts = [replace(p, weights=names[x.directory] or BASE) for p, x in zip(prompts, works, strict=True)]
        with base.lock, base.sampling_from(*names.values()) as engine:
            samples = sample(engine, base.tokenizer, prompts, works[0].options, base.longest, may_be_full=True)
        answers = []
        for work, found in zip(works, samples, strict=True):
            with base.lock, base.sampling_from(names[work.directory]):
                answers.append(self._answer(work.request, found))
        return answers

    def _answer(self, request: types.SampleRequest, samples: list[Sample]) -> bytes:
        """Samples, with the scores that the request asks for, as they are sent."""
        prompt, of_samples, of_prompt = request.prompt.to_ints(), list[dict[str, Tensor]](), dict[str, Tensor]()
        for one in samples:
            scores = (
                self._scores(prompt + one.tokens, request.topk_sample_logprobs) if request.topk_sample_logprobs else {}
            )
            of_samples.append({name: x[len(prompt) - 1 :] for name, x in scores.items()})
        if len(prompt) > 1 and (request.prompt_logprobs or request.topk_prompt_logprobs):
            of_prompt = self._scores(prompt, request.topk_prompt_logprobs)
        if (asked := request.target_prompt_logprobs) is not None:
            targets = asked.to_torch(pad_value=-1)
            chosen = self._scores(prompt, 0, targets.clamp_min(0))["log_probs"]
            of_prompt["of_targets"] = chosen.masked_fill(targets < 0, 0.0)
        return sample_response(request, samples, of_samples, of_prompt)

    def _scores(self, tokens: Sequence[int], top_k: int, targets: Tensor | None = None) -> dict[str, Tensor]:
        base = self.base
        datum = Datum(tokens[:-1], {TARGETS: tokens[1:] if targets is None else targets})
        rows = loss_rows([datum], LOSSES["cross_entropy"], {}, base.vocabulary, base.longest)
        return token_scores(base.scorer, base.head, rows, top_k)

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
            record = saved.read_record(directory)
            weights = saved.read_tensors(directory, saved.ADAPTER, record)
            found = self._made_resident(replace(record.adapter, seed=0), weights)
        self._resident[directory] = found
        return found[0]

    def _made_resident(self, shape: AdapterShape, weights: Mapping[str, Tensor]) -> tuple[str, AdapterShape]:
        """A frozen adapter with these weights: the one that was not used for longest, or a new one."""
        if len(self._resident) >= RESIDENT_SAMPLERS:
            name, of_oldest = self._resident.pop(next(iter(self._resident)))
            if of_oldest == shape:  # peft takes far longer to make one
                self.base.set_weights(name, weights)
                return name, shape
            self.base.remove(name)
        name = f"sampler_{uuid.uuid4().hex}"
        self.base.add_frozen(name, shape, weights)
        return name, shape
