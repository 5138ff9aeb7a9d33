"""The training service: sessions of clients, their models and samplers, and saved weights below one directory.

    DIRECTORY/MODEL_ID/weights/NAME              saved sessions, to continue from
                       sampler_weights/NAME      adapters to sample from
                       external_weights/NAME     adapters to download

`tinker://MODEL_ID/weights/NAME` is the address of the first. A NAME is a link to a hidden directory, so that what it
means changes at once when it is saved again. What a client has not saved ends with the service.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import Message
from tinker import types
from torch import Tensor

from verl.checkpoint.core.hashing import digest_of
from verl.errors import ConfigError, faults_below
from verl.models.lora import LoRA
from verl.service import saved
from verl.service.adapters import BASE, BaseModel
from verl.service.data import TARGETS, Datum, checked_tokens, loss_rows
from verl.service.jobs import MAX_ADAPTERS, Jobs, Late, SampleWork
from verl.service.losses import LOSSES, loss_of
from verl.service.sampling import UNKNOWN_ROOM, PromptRequest, Sample, SamplingOptions, sample
from verl.service.session import TrainingSession
from verl.service.wire import data_of, forward_backward_output, sample_response
from verl.tracking.jsonl import LineFile, json_line
from verl.utils.directories import TemporaryDirectory
from verl.utils.external_input import checked_name
from verl.utils.seeding import derive_seed

_log = logging.getLogger(__name__)

SESSION_TIMEOUT_S = 600.0  # without a sign of life of a client, which sends one every 10 s
URL_S = 3600  # that files can be downloaded by the URLs of a request
TTL_S = range(3600, 10 * 366 * 24 * 3600)  # of a checkpoint, by the protocol
MAX_MODELS = 64
MAX_RANK, ALPHA = 1024, 32.0  # of an adapter; alpha is not said by clients
RESIDENT_SAMPLERS = MAX_ADAPTERS  # adapters in memory that are sampled from; others are read from disk when needed
KEPT_SNAPSHOTS = 64  # of each model
MOST_SAMPLES = 1024  # of one request
MOST_SCORES = 2**24  # log-probs of one request
KINDS = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}
CHECKPOINTS = "*-train-*/*weights/[!.]*"  # links to all of them


def expiry(directory: Path) -> float:
    """When saved weights expire, in seconds since 1970, as their hidden directory is named; infinity for never."""
    named = re.fullmatch(r"\.[0-9a-f]{32}\.([0-9]+)", directory.name)
    return math.inf if named is None else float(named[1])


def digest(body: Any) -> str:
    """A digest of the content of a request."""
    is_protobuf = isinstance(body, Message)
    return digest_of(body.SerializeToString(deterministic=True) if is_protobuf else body.model_dump_json().encode())


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
    failed: str | None = None


@dataclass(frozen=True)
class Sampler:
    """A sampling session, on a saved adapter or on the base model.

    Attributes:
        noise: name of its noise: steps that the adapter had made, -1 for the base model, and the number of the client's
            earlier sessions with as many. So a loop that continues from a checkpoint has the noise of one that was not
            interrupted.
    """

    directory: Path | None
    address: str | None
    noise: tuple[int, int]


@dataclass
class Client:
    """A session of a client, with its models and samplers by name: ID:train:NUMBER, ID:sample:NUMBER."""

    seen_at: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class TrainingService:
    """Models in training and samplers on one base model, for several clients.

    Args:
        base: the model.
        names: under which clients may ask for it; the first is told to them.
        directory: of saved weights.
        seed: of adapters and samples for which a client gives none.
        joins: whether sample requests are joined to batches; else each is computed alone, with the same bits each time.
    """

    def __init__(self, base: BaseModel, names: Sequence[str], directory: Path, seed: int = 0, joins: bool = True):
        self.base, self.names, self.directory, self.seed, self._joins = base, list(names), directory, seed, joins
        self.clients: dict[str, Client] = {}
        self.tokenizer_directory = directory / "tokenizer"  # a model's own may be in a file that clients cannot read
        base.tokenizer.save_pretrained(self.tokenizer_directory)
        self._scratch = TemporaryDirectory("verl-service-")
        self.downloads = Path(self._scratch.name, "downloads")
        self.downloads.mkdir()
        self._resident: dict[Path, tuple[str, LoRA]] = {}  # frozen adapters; the last one was used last
        self._snapshots: dict[Path, Model] = {}  # likewise
        self.jobs = Jobs(self._sample_batch)

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
        """End a session: its models, samplers and unsaved snapshots will be freed."""
        if (client := self.clients.pop(name, None)) is None:
            return
        self.jobs.forget(name)

        def free() -> None:
            for model in client.models.values():
                self._drop_snapshots(model, 0)
                model.session.close()

        self.jobs.run(free)

    def sweep(self) -> None:
        """End sessions whose clients have gone, and drop old results and downloads."""
        for name, client in [*self.clients.items()]:
            if client.seen_at < time.monotonic() - SESSION_TIMEOUT_S:
                self.end_client(name)
        for link in self.downloads.iterdir():
            if link.lstat().st_mtime < time.time() - URL_S:
                link.unlink(missing_ok=True)
        for link in self.directory.glob(CHECKPOINTS):
            if expiry(link.resolve()) < time.time():
                self._remove(link)
        self.jobs.sweep()

    def close(self) -> None:
        self.jobs.close()
        self.base.close()
        self._scratch.cleanup()

    # Models

    def check(self, body: Any) -> None:
        """Refuse a request for what this service does not have."""
        for path, known in (
            ("base_model", self.names),
            ("optimizer_config.type", ["adamw"]),
            ("optim_params.type", ["adamw"]),
            ("kind", ["snapshot"]),
            ("age_encryption_recipients", [[]]),
            ("ttl_seconds", TTL_S),
            ("prompt_alt_tokens_k", [0]),
        ):
            value = functools.reduce(lambda x, name: getattr(x, name, None), path.split("."), body)
            if value is not None and value not in known:
                taken = known if isinstance(known, range) else ", ".join(map(str, known))
                raise ConfigError(f"{path} is {str(value)[:200]!r}: this service takes {taken}.")

    def create_model(self, body: types.CreateModelRequest) -> Any:
        if (lora := body.lora_config) is None or not 1 <= lora.rank <= MAX_RANK:
            raise ConfigError(f"lora_config is {lora}: this service trains adapters of rank 1 to {MAX_RANK}.")
        layers = self.base.layers(lora.train_attn, lora.train_mlp, lora.train_unembed)
        chosen = LoRA(rank=lora.rank, alpha=ALPHA, target_modules=layers)
        seed = derive_seed(self.seed, "adapter", body.model_seq_id) if lora.seed is None else lora.seed
        return self._create(body, lambda: TrainingSession(self.base, seed=seed, lora=chosen))

    def load_weights(self, body: types.LoadWeightsRequest) -> Any:
        """Load saved weights into a model, or into a new one."""

        def load(model: Model, _: Any) -> Any:
            model.session.load(self.saved_at(body.path), body.optimizer)
            model.failed = None  # the gradients are gone
            return {"path": body.path, "model_id": body.model_id, "type": body.type}

        if body.session_id is None or body.model_seq_id is None:
            return self.in_order(body, load)
        directory = self.saved_at(body.path)

        def loaded() -> TrainingSession:
            session = TrainingSession(self.base, lora=saved.read_record(directory, self.base).adapter)
            try:
                session.load(directory, body.optimizer)
            except BaseException:
                session.close()
                raise
            return session

        return self._create(body, loaded)

    def _create(self, body: Any, session: Callable[[], TrainingSession]) -> Any:
        """Queue a new model; the id of the request, which the SDK makes too, is that of the model."""
        client, name = self.client(body.session_id), f"{body.session_id}:train:{body.model_seq_id}"

        def work() -> Any:
            if name not in client.models:  # else the client repeats a request of a while ago
                if sum(len(client.models) for client in [*self.clients.values()]) >= MAX_MODELS:
                    raise ConfigError(f"{MAX_MODELS} models are in training: end a session first.")
                client.models[name] = Model(name, session())
            return {"model_id": name, "path": getattr(body, "path", ""), "type": body.type}

        return {"request_id": self.jobs.submit(name, body.session_id, work, digest(body))}

    def get_info(self, body: types.GetInfoRequest) -> Any:
        rank, name = self.model(body.model_id).session.lora.rank, self.names[0]
        arch, tokenizer = type(self.base.core).__name__, str(self.tokenizer_directory)
        data = {"arch": arch, "model_name": name, "tokenizer_id": tokenizer}
        more = {"model_id": body.model_id, "is_lora": True, "lora_rank": rank, "model_name": name}
        return {"type": "get_info", "model_data": data, **more}

    def in_order(self, body: Any, verb: Callable[..., Any]) -> Any:
        """Queue a verb of a model, called with the model and the request. Clients send those of a model one after
        another, numbered.

        Args:
            body: has `model_id` and `seq_id`.
        """
        if (body.seq_id or 0) < 1:
            raise ConfigError(f"seq_id is {body.seq_id}: requests of a model are numbered from 1.")
        model = self.model(body.model_id or "")
        owner, work = model.name.partition(":")[0], functools.partial(verb, model, body)
        return {"request_id": self.jobs.submit(f"{model.name}:{body.seq_id}", owner, work, digest(body))}

    def forward_backward(self, model: Model, message: Any) -> bytes:
        values = {key: value.text or value.number for key, value in message.loss_fn_config_v2.items()}
        settings: Any = {**message.loss_fn_config, **values}
        verb = model.session.forward if message.forward_only else model.session.forward_backward
        try:
            loss_of(message.loss_fn, settings)
            return forward_backward_output(verb(data_of(message), message.loss_fn, **settings))
        except BaseException as error:
            model.failed = model.failed if message.forward_only else str(error)
            raise

    def optim_step(self, model: Model, body: types.OptimStepRequest) -> Any:
        values: Any = body.optim_params
        if (failed := model.failed) is not None:  # a part of the gradients would be another step
            model.failed = None
            model.session.drop_gradients()
            raise ConfigError(f"a forward_backward since the last step has failed ({failed}): nothing was changed.")
        betas, limit = (values.beta1, values.beta2), max(values.grad_clip_norm, 0.0)
        metrics = model.session.optim_step(values.learning_rate, betas, values.eps, values.weight_decay, limit)
        self._note(model, metrics)
        return {"metrics": {name: x for name, x in metrics.items() if math.isfinite(x)}}

    def _note(self, model: Model, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step to `metrics.jsonl` of a model, of which `verl report` and `verl watch` make
        curves."""
        line = {"step": model.session.updates, "time_s": round(time.monotonic() - model.begun_at, 3)}
        try:
            directory = self.run_directory(model.name)
            directory.mkdir(parents=True, exist_ok=True)
            LineFile(directory / "metrics.jsonl").add(json_line(line | {f"actor/{k}": x for k, x in metrics.items()}))
        except OSError as error:  # the step was made
            _log.warning("The metrics of a step are lost: %s.", error)

    # Saved weights

    def save(self, model: Model, body: Any) -> Any:
        """Save a model under a name; for a sampler without one, until its session ends."""
        if body.path is None and body.type == "save_weights_for_sampler":
            name = self._snapshot(model, body.sampling_session_seq_id or 0)
            return {"path": None, "sampling_session_id": name, "type": body.type}
        name = f"step_{model.session.updates}_{body.seq_id}" if body.path is None else body.path
        address = f"tinker://{model.name}/{KINDS[body.type]}/{checked_name(name)}"
        link = self._link(address)
        if link.exists() and not getattr(body, "overwrite", False):
            raise ConfigError(f"path is {name!r}: there is something already. Give another name.")
        former, expires = link.resolve() if link.exists() else None, ""
        if body.ttl_seconds is not None:
            expires = f".{int(time.time()) + body.ttl_seconds}"
        directory = link.with_name(f".{uuid.uuid4().hex}{expires}")
        model.session.save(directory, optimizer=body.type == "save_weights")
        new = directory.with_suffix(".link")
        new.symlink_to(directory.name)
        new.replace(link)
        if former is not None:
            self._drop(former)
        return {"path": address, "type": body.type}

    def _snapshot(self, model: Model, number: int) -> str:
        """Save a model for the sampling session of a number; returns its id."""
        directory = Path(self._scratch.name) / uuid.uuid4().hex
        model.session.save(directory, optimizer=False)
        self._snapshots[directory] = model
        self._drop_snapshots(model, KEPT_SNAPSHOTS)
        return self._create_sampler(model.name.partition(":")[0], number, directory)

    def run_directory(self, name: str) -> Path:
        """The directory of a model: its id, without what is not in names of files."""
        return self.directory / checked_name(name.replace(":train:", "-train-"))

    def saved_at(self, address: str) -> Path:
        """The directory of saved weights.

        Raises:
            ValueError: it is no address.
            NotFound: there are none at the address.
        """
        directory = self._link(address).resolve()
        if not (directory / saved.RECORD).is_file() or expiry(directory) < time.time():
            raise NotFound(f"path is {address[:200]!r}: there is no such checkpoint.")
        return directory

    def _link(self, address: str) -> Path:
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(address)
        kind, name = parsed.checkpoint_id.split("/")
        return self.run_directory(parsed.training_run_id) / kind / checked_name(name)

    def checkpoints(self, name: str | None = None) -> list[types.Checkpoint]:
        """The named checkpoints of a model, or of all, oldest first."""
        run, found = "*-train-*" if name is None else self.run_directory(name).name, list[types.Checkpoint]()
        for link in self.directory.glob(CHECKPOINTS.replace("*-train-*", run)):
            run, kind, name = link.parts[-3:]
            address = f"tinker://{run.replace('-train-', ':train:')}/{kind}/{name}"
            parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(address).model_dump(exclude={"training_run_id"})
            try:
                moment, ends = link.stat().st_mtime, expiry(self.saved_at(address))
                size = sum(file.stat().st_size for file in link.iterdir())
            except (FileNotFoundError, NotFound):  # deleted meanwhile
                continue
            times = {"time": moment, "expires_at": None if ends == math.inf else ends}  # pydantic reads seconds in UTC
            found.append(types.Checkpoint(**parsed, **times, size_bytes=size))  # pyright: ignore[reportArgumentType]
        return sorted(found, key=lambda x: (x.time, x.tinker_path))

    def delete(self, address: str) -> None:
        self.saved_at(address)
        self._remove(self._link(address))

    def _remove(self, link: Path) -> None:
        directory = link.resolve()
        link.unlink(missing_ok=True)
        self.jobs.run(lambda: self._drop(directory))

    def _drop_snapshots(self, model: Model, num_kept: int) -> None:
        of_model = [directory for directory, owner in self._snapshots.items() if owner is model]
        for directory in of_model[: max(0, len(of_model) - num_kept)]:
            del self._snapshots[directory]
            self._drop(directory)

    def _drop(self, directory: Path) -> None:
        """Remove saved weights, in the thread that computes."""
        if (found := self._resident.pop(directory, None)) is not None:
            self.base.remove(found[0])
        shutil.rmtree(directory, ignore_errors=True)

    # Samples

    def create_sampling_session(self, body: types.CreateSamplingSessionRequest) -> Any:
        directory = None if body.model_path is None else self.saved_at(body.model_path)
        name = self._create_sampler(body.session_id, body.sampling_session_seq_id, directory, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _create_sampler(self, client: str, number: int, directory: Path | None, address: str | None = None) -> str:
        """A sampling session on a saved adapter, or on the base model; returns its id."""
        name, known = f"{client}:sample:{number}", self.client(client).samplers
        if name in known and known[name].directory != directory:
            raise ConfigError(f"the number of sampling session {name} is that of an earlier, different one.")
        if name not in known:
            updates = -1 if directory is None else saved.read_record(directory, self.base).updates
            alike = sum(sampler.noise[0] == updates for sampler in [*known.values()])
            known[name] = Sampler(directory, address, (updates, alike))
        return name

    def sample(self, request: types.SampleRequest) -> Any:
        """Queue a sample request.

        Raises:
            ConfigError: a value is out of its range.
            Busy: too many wait.
        """
        name, params, base = request.sampling_session_id or "", request.sampling_params, self.base
        sampler, tokens, count = self.sampler(name), request.prompt.to_ints(), request.num_samples
        if request.seq_id is None:
            raise ConfigError("seq_id is missing: requests of a sampling session are numbered.")
        with faults_below("sampling_params"):
            options = SamplingOptions(
                max_new_tokens=params.max_tokens, temperature=params.temperature, top_k=max(params.top_k, 0),
                top_p=params.top_p, stop=params.stop,  # pyright: ignore[reportArgumentType] - a list becomes a tuple
            )  # fmt: skip
        checked_tokens(tokens, "prompt", base.vocabulary, base.longest)
        last, targets = request.prompt_logprobs_last_n, request.target_prompt_logprobs
        topk, longest = (request.topk_prompt_logprobs, request.topk_sample_logprobs), base.longest or UNKNOWN_ROOM
        scores = len(tokens) * topk[0] + count * min(options.max_new_tokens or longest, longest) * topk[1]
        scores += 0 if targets is None else math.prod(max(0, size) for size in targets.shape or ())
        for path, value, low, high in (
            ("num_samples", count, 1, MOST_SAMPLES),
            ("topk_prompt_logprobs", topk[0], 0, base.vocabulary),
            ("topk_sample_logprobs", topk[1], 0, base.vocabulary),
            ("prompt_logprobs_last_n", 1 if last is None else last, 1, 1 if last is None else len(tokens) - 1),
            ("the number of log-probs that are asked for", scores, 0, MOST_SCORES),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{path} is {value}: must lie between {low} and {high}.")
        _targets_of(request, base.vocabulary)
        if len(tokens) == base.longest and not (request.prompt_logprobs or topk[0] or targets is not None):
            raise ConfigError(f"prompt has {len(tokens)} tokens, as many as the model reads: it leaves no response.")
        noise = (self.seed, *sampler.noise, request.seq_id) if params.seed is None else (params.seed,)
        job_id, kind = f"{name}:{request.seq_id}", (options, None if base.mixes else sampler.directory)
        work = SampleWork(kind if self._joins else job_id, sampler.directory, count, request, options, noise)
        self.jobs.submit(job_id, name.partition(":")[0], work, digest(request))
        return {"request_id": job_id, "sample_sequence_ids": [f"{job_id}:{index}" for index in range(count)]}

    def _sample_batch(self, begun: Sequence[SampleWork], late: Late) -> list[bytes]:
        """Samples of requests that sample alike, of up to `MAX_ADAPTERS` adapters, in the thread that computes."""
        base, names = self.base, {work.adapter: self._resident_adapter(work.adapter) for work in begun}
        works: list[SampleWork] = []

        def prompts_of(new: Sequence[SampleWork]) -> list[PromptRequest]:
            works.extend(new)
            of_each = [(names[x.adapter] or BASE) if len(names) > 1 else "" for x in new]
            rows = zip(new, of_each, strict=True)
            return [PromptRequest(x.request.prompt.to_ints(), x.num_samples, x.noise, name) for x, name in rows]

        prompts, options = prompts_of(begun), begun[0].options
        with base.sampling_from(*names.values()) as engine:
            samples = sample(engine, base.tokenizer, prompts, options, base.longest, lambda: prompts_of(late()))
        found = zip(works, samples, strict=True)
        return [self._answer(work.request, of_work, names[work.adapter]) for work, of_work in found]

    def _answer(self, request: types.SampleRequest, samples: list[Sample], adapter: str | None) -> bytes:
        """Samples, with the scores that the request asks for, as they are sent."""
        prompt, top_k = request.prompt.to_ints(), request.topk_sample_logprobs
        of_samples, of_prompt = [dict[str, Tensor]()] * len(samples), dict[str, Tensor]()
        if top_k:
            temperature = request.sampling_params.temperature or 1.0  # as the log-probs of the samples
            rows = [self._scores(adapter, prompt + one.tokens, top_k, temperature=temperature) for one in samples]
            of_samples = [{name: x[len(prompt) - 1 :] for name, x in row.items()} for row in rows]
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            of_prompt = self._scores(adapter, prompt, request.topk_prompt_logprobs)
        if (targets := _targets_of(request, self.base.vocabulary)) is not None:
            chosen = self._scores(adapter, prompt, 0, targets.clamp_min(0))["log_probs"]
            of_prompt["of_targets"] = chosen.masked_fill(targets < 0, 0.0)
        return sample_response(request, samples, of_samples, of_prompt)

    def _scores(
        self, adapter: str | None, tokens: Sequence[int], top_k: int, targets: Tensor | None = None, **options: float
    ) -> dict[str, Tensor]:
        if len(tokens) == 1:  # nothing precedes it
            empty = torch.zeros(0, top_k)
            likeliest = {"likeliest": empty, "of_likeliest": empty} if top_k else {}
            return {"log_probs": torch.zeros(0) if targets is None else targets.float(), **likeliest}
        base, datum = self.base, Datum(tokens[:-1], {TARGETS: tokens[1:] if targets is None else targets})
        rows = loss_rows([datum], LOSSES["cross_entropy"], {}, base.vocabulary, base.longest)
        with base.sampling_from(adapter):
            found = base.scorer.infer(rows.batch, functools.partial(rows.scores, base.head, top_k=top_k, **options))
        return {name: x[0] for name, x in found.items()}

    def _resident_adapter(self, directory: Path | None) -> str | None:
        """The name of the frozen adapter of a directory, read if it is not in memory; None for the base model."""
        if directory is None:
            return None
        if (model := self._snapshots.pop(directory, None)) is not None:
            self._snapshots[directory] = model
        if (found := self._resident.pop(directory, None)) is None:
            if not directory.is_dir():
                raise ConfigError(
                    f"the weights of this sampler are gone: a model keeps the {KEPT_SNAPSHOTS} snapshots without a "
                    "name that were used last, and others until they are deleted."
                )
            record = saved.read_record(directory, self.base)
            weights = saved.read_tensors(directory, saved.ADAPTER, record)
            if len(self._resident) >= RESIDENT_SAMPLERS:
                found = self._resident.pop(next(iter(self._resident)))
            if found is None or found[1] != record.adapter:  # peft takes far longer to make one
                if found is not None:
                    self.base.remove(found[0])
                found = f"sampler_{uuid.uuid4().hex}", record.adapter
                self.base.make(*found)
            self.base.set_weights(found[0], weights)
        self._resident[directory] = found
        return found[0]


def _targets_of(request: types.SampleRequest, vocabulary: int) -> Tensor | None:
    """`target_prompt_logprobs` of a request, [prompt tokens - 1, K], with -1 for none.

    Raises:
        ConfigError: it is no such tensor.
    """
    if (asked := request.target_prompt_logprobs) is None:
        return None
    try:
        targets = asked.to_torch(pad_value=-1)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"target_prompt_logprobs cannot be read: {error}") from error
    rows, shape = len(request.prompt.to_ints()) - 1, [*targets.shape]
    if targets.is_floating_point() or targets.dim() != 2 or len(targets) != rows or not shape[1]:
        raise ConfigError(f"target_prompt_logprobs is {asked.dtype} of shape {shape}: expected int64 of [{rows}, K].")
    if bool(((targets < -1) | (targets >= vocabulary)).any()):
        raise ConfigError(f"target_prompt_logprobs has other numbers than ids, 0 to {vocabulary - 1}, and -1 for none.")
    return targets
