"""The training service over HTTP, in the protocol of Tinker's SDK 0.38: routes, limits, long polls, errors.

    POST /api/v1/create_session, session_heartbeat, create_model, forward_backward, optim_step, save_weights,
         load_weights, save_weights_for_sampler, create_sampling_session, asample, retrieve_future, cancel_future, ...
    GET  /api/v1/healthz, get_server_capabilities, checkpoints, samplers/ID, ...

Work is answered at once with the id of a request, whose result is fetched by `retrieve_future`. A failure is a result
too, of the category `user` or `server`; a request that cannot be accepted is a status of HTTP with a `detail`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import inspect
import ipaddress
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio.to_thread
import zstandard
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from verl.errors import ConfigError, VerlError
from verl.service import saved
from verl.service.adapters import AdapterShape
from verl.service.jobs import Busy
from verl.service.sampling import SamplingOptions
from verl.service.service import SCHEME, NotFound, PendingSample, TrainingService
from verl.service.wire import data_of, forward_backward_message, forward_backward_output, settings_of, targets_of
from verl.utils.external_input import ExternalInputError, checked_name
from verl.utils.seeding import derive_seed

_log = logging.getLogger(__name__)

MAX_BODY_BYTES, MAX_JSON_BYTES = 64 << 20, 8 << 20  # of training data, and of other requests
POLL_S = 30.0  # that a request for a result is held open
SWEEP_S = 10.0
URL_S = 3600  # that a download is announced for
Handler = Callable[[Request], Awaitable[Response]]


def application(service: TrainingService, token: str | None = None) -> Starlette:
    """The application of a service.

    Args:
        token: that clients must give as their API key; None for any.
    """
    return _Api(service, token).app


class _Api:
    def __init__(self, service: TrainingService, token: str | None):
        self.service, self.token = service, token
        v1 = "/api/v1"
        post = {
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "client/config": self.client_config,
            "client/dynamic_config": self.client_dynamic_config,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "save_weights_external": self.save_weights_external,
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "sessions/{session}/finish": self.finish_session,
        }
        get = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "training_runs/{run}/checkpoints": self.run_checkpoints,
            "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls": self.urls,
            "checkpoints": self.all_checkpoints,
            "samplers/{sampler}": self.sampler,
            "files/{run}/{kind}/{name}/{file}": self.file,
        }
        routes = [Route(f"{v1}/{path}", self._answered(handler), methods=["POST"]) for path, handler in post.items()]
        routes += [Route(f"{v1}/{path}", self._answered(handler), methods=["GET"]) for path, handler in get.items()]
        path = f"{v1}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
        routes.append(Route(path, self._answered(self.delete_checkpoint), methods=["DELETE"]))
        self.app = Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: _no_route, 405: _no_route}
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_S)
                try:
                    await anyio.to_thread.run_sync(self.service.sweep)
                except Exception:  # noqa: BLE001 - the next time it may succeed
                    _log.error("Sessions that have ended could not be freed.", exc_info=True)

        task = asyncio.create_task(sweep())
        try:
            yield
        finally:
            task.cancel()
            await anyio.to_thread.run_sync(self.service.close)

    def _answered(self, handler: Callable[..., Any]) -> Handler:
        """A handler whose body is parsed by the type of its second argument, and whose errors are answers."""
        parameters = [*inspect.signature(handler, eval_str=True).parameters.values()]
        kind: Any = parameters[1].annotation if len(parameters) > 1 else None

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            try:
                key = request.headers.get("x-api-key", "")  # which a page of a browser cannot send without being asked
                if not key or not hmac.compare_digest(key.encode(), (self.token or key).encode()):
                    return _failure(401, "the API key (X-API-Key) is not that of this service.")
                if self.token is None and not is_this_machine(request.url.hostname):
                    return _failure(403, "without a key this service is for this machine alone, by its own names.")
                if kind is None:
                    found = handler(request)
                else:
                    content = await _body(request, MAX_BODY_BYTES if kind is bytes else MAX_JSON_BYTES)
                    found = handler(request, content if kind is bytes else _parsed(kind, content))
                found = await found if inspect.isawaitable(found) else found
                return found if isinstance(found, Response) else JSONResponse(found)
            except NotFound as error:
                return _failure(404, str(error))
            except Busy as error:
                return _failure(429, str(error))
            except _Refused as error:
                return _failure(error.status, str(error))
            except (VerlError, ExternalInputError) as error:
                return _failure(422, f"{request.url.path}: {error}")
            except Exception as error:  # noqa: BLE001 - answered
                _log.error("%s failed.", request.url.path, exc_info=True)
                return _failure(500, f"{request.url.path}: {type(error).__name__}: {error}")

        return answer

    # Sessions

    def create_session(self, _: Request) -> dict[str, Any]:
        return {"type": "create_session", "session_id": self.service.create_client()}

    def heartbeat(self, _: Request, body: types.SessionHeartbeatRequest) -> Any:
        try:
            self.service.client(body.session_id)
        except NotFound as error:
            return _failure(410, str(error))
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request) -> Response:
        await anyio.to_thread.run_sync(self.service.end_client, request.path_params["session"])
        return Response(status_code=204)

    def client_config(self, _: Request) -> dict[str, Any]:
        """Flags of the SDK: keys instead of tokens that expire, and results one by one."""
        return {"pjwt_auth_enabled": False, "sample_use_retrieve_futures": False, "custom_loss_server_side": False}

    def client_dynamic_config(self, _: Request) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    def telemetry(self, _: Request) -> dict[str, Any]:
        """Accepted and dropped."""
        return {"status": "accepted"}

    def health(self, _: Request) -> dict[str, Any]:
        return {"status": "ok"}

    def capabilities(self, _: Request) -> dict[str, Any]:
        longest = self.service.base.longest
        models = [{"model_name": name, "max_context_length": longest} for name in self.service.names]
        return {"supported_models": [{**model, "trainable": True, "sampleable": True} for model in models]}

    # Training

    def create_model(self, _: Request, body: types.CreateModelRequest) -> dict[str, Any]:
        self.service.check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        if body.lora_config is None:
            raise ConfigError("lora_config is missing: this service trains adapters.")
        lora = body.lora_config
        shape = AdapterShape(
            rank=lora.rank, attention=lora.train_attn, mlp=lora.train_mlp, unembedding=lora.train_unembed,
            seed=derive_seed(self.service.seed, "adapter", body.model_seq_id) if lora.seed is None else lora.seed,
        )  # fmt: skip
        return {"request_id": self.service.create_model(body.session_id, body.model_seq_id, shape)}

    def get_info(self, _: Request, body: types.GetInfoRequest) -> dict[str, Any]:
        session, name = self.service.model(body.model_id).session, self.service.names[0]
        rank = session.shape.rank
        tokenizer = str(self.service.tokenizer_directory)
        data = {"arch": type(self.service.base.core).__name__, "model_name": name, "tokenizer_id": tokenizer}
        return {
            "type": "get_info", "model_data": data, "model_id": body.model_id, "is_lora": True,
            "lora_rank": rank, "model_name": name,
        }  # fmt: skip

    async def forward_backward(self, request: Request, body: bytes) -> dict[str, Any]:
        if request.headers.get("content-encoding") == "zstd":
            body = _decompressed(body)
        message = await anyio.to_thread.run_sync(forward_backward_message, body)

        def work(model: Any) -> bytes:
            session = model.session
            if message.forward_only:
                return forward_backward_output(session.forward(*data_of(message), **settings_of(message)))
            try:
                return forward_backward_output(session.forward_backward(*data_of(message), **settings_of(message)))
            except BaseException as error:
                model.failed = str(error)
                raise

        return {"request_id": self.service.in_order(message.model_id, message.seq_id, work)}

    def optim_step(self, _: Request, body: types.OptimStepRequest) -> dict[str, Any]:
        values = body.optim_params

        def work(model: Any) -> dict[str, Any]:
            if not isinstance(values, types.AdamParams):
                raise ConfigError(f"optim_params.type is {getattr(values, 'type', None)!r}: this service has AdamW.")
            if (failed := model.failed) is not None:  # a part of the gradients would be another step than was asked for
                model.failed = None
                model.session.drop_gradients()
                raise ConfigError(f"a forward_backward since the last step has failed ({failed}): nothing was changed.")
            metrics = model.session.optim_step(
                values.learning_rate, (values.beta1, values.beta2), values.eps, values.weight_decay,
                values.grad_clip_norm if values.grad_clip_norm > 0 else None,
            )  # fmt: skip
            self.service.note(body.model_id, metrics)
            return {"metrics": {name: x for name, x in metrics.items() if math.isfinite(x)}}

        return {"request_id": self.service.in_order(body.model_id, body.seq_id, work)}

    # Saved weights

    def save_weights(self, _: Request, body: types.SaveWeightsRequest) -> dict[str, Any]:
        def work(model: Any) -> dict[str, Any]:
            name = body.path if body.path is not None else f"step_{model.session.updates}_{body.seq_id}"
            path = self.service.save(body.model_id, "weights", name, overwrites=body.overwrite)
            return {"path": path, "type": "save_weights"}

        return {"request_id": self.service.in_order(body.model_id, body.seq_id, work)}

    def save_weights_external(self, _: Request, body: types.SaveWeightsExternalRequest) -> dict[str, Any]:
        def work(_: Any) -> dict[str, Any]:
            if body.age_encryption_recipients:
                raise ConfigError("age_encryption_recipients: this service does not encrypt.")
            return {"path": self.service.save(body.model_id, "external_weights", body.path)}

        return {"request_id": self.service.in_order(body.model_id, body.seq_id, work)}

    def save_weights_for_sampler(self, _: Request, body: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        path, number = body.path, body.sampling_session_seq_id

        def work(_: Any) -> dict[str, Any]:
            if body.kind != "snapshot":
                raise ConfigError(f"kind is {body.kind!r}: this service samples from snapshots.")
            if path is None and number is None:
                raise ConfigError("path and sampling_session_seq_id are missing: expected one of them.")
            answer: dict[str, Any] = {"path": None, "type": "save_weights_for_sampler"}
            if path is not None:
                return answer | {"path": self.service.save(body.model_id, "sampler_weights", path)}
            return answer | {"sampling_session_id": self.service.snapshot(body.model_id, number or 0)}

        return {"request_id": self.service.in_order(body.model_id, body.seq_id, work)}

    def load_weights(self, _: Request, body: types.LoadWeightsRequest) -> dict[str, Any]:
        if body.session_id is not None and body.model_seq_id is not None:
            self.service.check_base(body.base_model)
            _check_optimizer(body.optimizer_config)
            arguments = body.session_id, body.model_seq_id, body.path, body.optimizer
            return {"request_id": self.service.create_model_from(*arguments)}

        def work(model: Any) -> dict[str, Any]:
            self.service.check_base(body.base_model)
            model.session.load(self.service.saved_at(body.path), body.optimizer)
            model.failed = None  # the gradients are gone
            return {"path": body.path, "model_id": body.model_id, "type": "load_weights"}

        return {"request_id": self.service.in_order(body.model_id or "", body.seq_id, work)}

    def weights_info(self, _: Request, body: _Address) -> dict[str, Any]:
        shape = saved.read_record(self.service.saved_at(body.tinker_path))["shape"]
        return {
            "base_model": self.service.names[0], "is_lora": True, "lora_rank": shape["rank"],
            "train_unembed": shape["unembedding"], "train_mlp": shape["mlp"], "train_attn": shape["attention"],
        }  # fmt: skip

    def run_checkpoints(self, request: Request) -> dict[str, Any]:
        return {"checkpoints": self.service.checkpoints(request.path_params["run"])}

    def all_checkpoints(self, request: Request) -> dict[str, Any]:
        shown, cursor = _page(request, self.service.checkpoints())
        return {"checkpoints": shown, "cursor": cursor}

    async def delete_checkpoint(self, request: Request) -> Response:
        await anyio.to_thread.run_sync(self.service.delete, _address(request))
        return Response(status_code=204)

    def urls(self, request: Request) -> dict[str, Any]:
        directory, values = self.service.saved_at(_address(request)), request.path_params
        base = f"{request.url.scheme}://{request.url.netloc}/api/v1/files/{values['run']}/{values['kind']}/{values['name']}"
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=URL_S)
        names = sorted(file.name for file in directory.iterdir() if file.name != saved.RECORD)
        return {"urls": {name: f"{base}/{name}" for name in names}, "expires": expires.isoformat()}

    def file(self, request: Request) -> Response:
        path = self.service.saved_at(_address(request)) / checked_name(request.path_params["file"])
        if not path.is_file():
            raise NotFound(f"there is no file {path.name!r} in this checkpoint.")
        return FileResponse(path)

    # Samples

    def create_sampling_session(self, _: Request, body: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        self.service.check_base(body.base_model)
        name = self.service.create_sampler(body.session_id, body.sampling_session_seq_id, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampler(self, request: Request) -> dict[str, Any]:
        name = request.path_params["sampler"]
        address = self.service.sampler(name).address
        return {"sampler_id": name, "base_model": self.service.names[0], "model_path": address}

    def sample(self, _: Request, body: types.SampleRequest) -> dict[str, Any]:
        if body.sampling_session_id is None or body.seq_id is None:
            raise ConfigError("sampling_session_id and seq_id are missing: create a sampling session first.")
        if body.prompt_alt_tokens_k:
            raise ConfigError("prompt_alt_tokens_k: this service draws no tokens at places of a prompt.")
        if any(not isinstance(chunk, types.EncodedTextChunk) for chunk in body.prompt.chunks):
            raise ConfigError("prompt has a chunk that is no text: text alone is supported.")
        params, targets, layout = body.sampling_params, None, None
        tokens = body.prompt.to_ints()
        if body.target_prompt_logprobs is not None:
            targets, layout = targets_of(body.target_prompt_logprobs, "target_prompt_logprobs", len(tokens) - 1)
            if targets.numel() and int(targets.max()) >= self.service.base.vocabulary:
                raise ConfigError("target_prompt_logprobs has ids that are no tokens.")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(body, name) <= self.service.base.vocabulary:
                raise ConfigError(
                    f"{name} is {getattr(body, name)}: must lie between 0 and the size of the vocabulary."
                )
        last = body.prompt_logprobs_last_n
        if last is not None and not 1 <= last < len(tokens):
            raise ConfigError(f"prompt_logprobs_last_n is {last}: must lie between 1 and {len(tokens) - 1}.")
        stop = params.stop if params.stop is None or isinstance(params.stop, str) else tuple(params.stop)
        options = SamplingOptions(params.max_tokens, params.temperature, max(params.top_k, 0), params.top_p, stop)
        further = PendingSample(
            topk_samples=body.topk_sample_logprobs, scores_prompt=bool(body.prompt_logprobs),
            topk_prompt=body.topk_prompt_logprobs, targets=targets, layout=layout,
            first_scored=1 if last is None else len(tokens) - last,
        )  # fmt: skip
        sampler, number = body.sampling_session_id, body.seq_id
        name = self.service.sample(sampler, number, tokens, body.num_samples, options, params.seed, further)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(body.num_samples)]}

    # Results

    async def retrieve_future(self, _: Request, body: types.FutureRetrieveRequest) -> Response:
        job = self.service.jobs.job(body.request_id)
        if job is None:
            raise NotFound(f"request_id is {body.request_id[:120]!r}: no such request, or its session has ended.")
        waiting = asyncio.wrap_future(job.future)
        await asyncio.wait([waiting], timeout=POLL_S)
        if not waiting.done():
            waits = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waits, status_code=408)
        job.fetched_at = time.monotonic()
        if waiting.cancelled():
            return JSONResponse({"error": "the request was cancelled.", "category": "user"})
        error = waiting.exception()
        if isinstance(error, VerlError | ExternalInputError):
            return JSONResponse({"error": str(error), "category": "user"})
        if error is not None:
            _log.error("Request %s failed.", body.request_id, exc_info=error)
            return JSONResponse({"error": f"{type(error).__name__}: {error}", "category": "server"})
        result = waiting.result()
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    def cancel_future(self, _: Request, body: types.FutureRetrieveRequest) -> Response:
        job = self.service.jobs.job(body.request_id)
        if job is not None and job.is_sample and job.future.cancel():  # later steps of a model wait for the others
            job.fetched_at = time.monotonic()
        return Response(status_code=204)


def _check_optimizer(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise ConfigError(f"optimizer_config.type is {config.type!r}: this service has adamw.")


class _Address(BaseModel):
    tinker_path: str


class _Refused(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def is_this_machine(host: str | None) -> bool:
    """Whether a request names this machine: a page of a name that was bound to it anew does not."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    return False


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _Refused(413, f"the body has more than {most} bytes.")
        parts.append(part)
    return b"".join(parts)


def _decompressed(content: bytes) -> bytes:
    try:
        found = zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_BODY_BYTES)
    except zstandard.ZstdError as error:
        raise _Refused(400, f"the body is not what Content-Encoding says: {error}") from error
    return found


def _parsed(kind: Any, content: bytes) -> Any:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise _Refused(422, f"{where}: {first['msg']}.") from error


def _address(request: Request) -> str:
    values = request.path_params
    return f"{SCHEME}{values['run']}/{values['kind']}/{values['name']}"


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        offset, limit = (int(request.query_params.get(name, value)) for name, value in (("offset", 0), ("limit", 100)))
    except ValueError as error:
        raise _Refused(422, "offset and limit must be whole numbers.") from error
    return items[max(offset, 0) :][: max(limit, 0)], {"offset": offset, "limit": limit, "total_count": len(items)}


def _failure(status: int, detail: str) -> Response:
    return Response(json.dumps({"detail": detail}), status, media_type="application/json")


async def _no_route(request: Request, _: Exception) -> Response:
    return _failure(404, f"{request.method} {request.url.path}: this service does not have it.")
