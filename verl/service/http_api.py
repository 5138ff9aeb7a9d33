"""The training service over HTTP, in the protocol of Tinker's SDK 0.38: routes, limits, long polls, errors.

Bodies are the SDK's own types. Work is answered at once with the id of a request, whose result is fetched by
`retrieve_future`. A failure is a result too, of the category `user` or `server`; a request that cannot be accepted is a
status of HTTP with a `detail`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import ipaddress
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from google.protobuf.message import DecodeError
from pydantic import NonNegativeInt
from starlette.requests import ClientDisconnect
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from verl.errors import ConfigError, VerlError
from verl.models.lora import LoRA
from verl.service import saved
from verl.service.jobs import FETCHED_S
from verl.service.losses import loss_of
from verl.service.service import URL_S, Model, NotFound, TrainingService
from verl.service.session import NoGradients
from verl.service.wire import data_of, forward_backward_output
from verl.utils.seeding import derive_seed

_log = logging.getLogger(__name__)

MAX_BODY_BYTES, MAX_JSON_BYTES = 64 << 20, 8 << 20  # of training data, and of other requests
MAX_RANK, ALPHA = 1024, 32.0  # of an adapter; alpha is not said by clients
POLL_S = 30.0  # that a request for a result is held open
PREFIX = "/api/v1"
DOWNLOADS = f"{PREFIX}/downloads"
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
FLAGS = {  # of the SDK: keys instead of tokens that expire, results one by one, requests of a model one after another
    "pjwt_auth_enabled": False,
    "sample_use_retrieve_futures": False,
    "parallel_fwdbwd_chunks": False,
}
ALWAYS = {
    "/client/config": FLAGS,
    "/client/dynamic_config": {"sample_cancel_enabled": True},
    "/telemetry": {"status": "accepted"},  # and dropped
    "/healthz": {"status": "ok"},
}


def application(service: TrainingService, token: str | None = None) -> FastAPI:
    """The application of a service.

    Args:
        token: that clients must give as their API key; None for any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    routes = APIRouter(prefix=PREFIX)
    for add in (_add_sessions, _add_training, _add_saved_weights, _add_samples):
        add(routes, service)
    app.include_router(routes)
    app.mount(DOWNLOADS, StaticFiles(directory=service.downloads, follow_symlink=True))

    @app.middleware("http")
    async def guard(request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        key, path = request.headers.get("x-api-key", ""), request.url.path
        if path.startswith(f"{DOWNLOADS}/"):  # whoever has the URL may read
            return await handler(request)
        if not key or not hmac.compare_digest(key.encode(), (token or key).encode()):  # no page of a browser sends one
            return _failure(401, "the API key (X-API-Key) is not that of this service.")
        if token is None and not is_this_machine(request.url.hostname):
            return _failure(403, "without a key this service is for this machine alone, by its own names.")
        most = MAX_BODY_BYTES if path == f"{PREFIX}/forward_backward" else MAX_JSON_BYTES
        if "transfer-encoding" in request.headers or int(request.headers.get("content-length", 0)) > most:
            return _failure(413, f"the body has more than {most} bytes, or no Content-Length.")
        return await handler(request)

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ValueError)
    @app.exception_handler(VerlError)
    async def refused(request: Request, error: Exception) -> Response:
        return _failure(getattr(error, "status", 422), f"{request.url.path}: {error}")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _failure(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}.")

    return app


def is_this_machine(host: str | None) -> bool:
    """Whether a request names this machine: a page of a name that was bound to it anew does not."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    return False


def _failure(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status)


def _add_sessions(routes: APIRouter, service: TrainingService) -> None:
    @routes.post("/create_session")
    async def create_session() -> Any:
        return {"type": "create_session", "session_id": service.create_client()}

    @routes.post("/session_heartbeat")
    async def session_heartbeat(body: types.SessionHeartbeatRequest) -> Any:
        service.sweep()
        if body.session_id not in service.clients:
            return _failure(410, "the session has ended, or the service was started again.")
        service.client(body.session_id)
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session}/finish", status_code=204)
    async def finish_session(session: str) -> None:
        service.end_client(session)

    def always(answer: Any) -> Callable[[], Any]:
        return lambda: answer

    for path, answer in ALWAYS.items():
        routes.add_api_route(path, always(answer), methods=["GET" if path == "/healthz" else "POST"])

    @routes.get("/get_server_capabilities")
    async def capabilities() -> Any:
        fields = {"max_context_length": service.base.longest, "trainable": True, "sampleable": True}
        models = [types.SupportedModel(model_name=name, **fields) for name in service.names]
        return types.GetServerCapabilitiesResponse(supported_models=models)

    @routes.post("/retrieve_future")
    async def retrieve_future(body: types.FutureRetrieveRequest) -> Response:
        if (job := service.jobs.job(body.request_id)) is None:
            raise NotFound(f"request_id is {body.request_id[:120]!r}: no such request, or its session has ended.")
        waiting = asyncio.wrap_future(job.future)
        waiting.add_done_callback(lambda x: x.cancelled() or x.exception())  # else asyncio logs one that nobody awaits
        await asyncio.wait([waiting], timeout=POLL_S)
        if not waiting.done():
            return JSONResponse({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
        job.keep(FETCHED_S)
        error = ConfigError("the request was cancelled.") if waiting.cancelled() else waiting.exception()
        if isinstance(error, ValueError | NoGradients):
            return JSONResponse({"error": str(error), "category": "user"})
        if error is not None:
            _log.error("Request %s failed.", body.request_id, exc_info=error)
            return JSONResponse({"error": f"{type(error).__name__}: {error}", "category": "server"})
        found = waiting.result()
        return Response(found, media_type="application/x-protobuf") if isinstance(found, bytes) else JSONResponse(found)

    @routes.post("/cancel_future", status_code=204)
    async def cancel_future(body: types.FutureRetrieveRequest) -> None:
        job = service.jobs.job(body.request_id)
        if job is not None and job.sample is not None:  # later steps of a model wait for the others
            job.future.cancel()


def _add_training(routes: APIRouter, service: TrainingService) -> None:
    @routes.post("/create_model")
    async def create_model(body: types.CreateModelRequest) -> Any:
        service.check_base(body.base_model, body.optimizer_config)
        if (lora := body.lora_config) is None or not 1 <= lora.rank <= MAX_RANK:
            raise ConfigError(f"lora_config is {lora}: this service trains adapters of rank 1 to {MAX_RANK}.")
        layers = service.base.layers(lora.train_attn, lora.train_mlp, lora.train_unembed)
        chosen = LoRA(rank=lora.rank, alpha=ALPHA, target_modules=layers)
        seed = derive_seed(service.seed, "adapter", body.model_seq_id) if lora.seed is None else lora.seed
        return {"request_id": service.create_model(body.session_id, body.model_seq_id, chosen, seed)}

    @routes.post("/get_info")
    async def get_info(body: types.GetInfoRequest) -> Any:
        rank, name = service.model(body.model_id).session.lora.rank, service.names[0]
        arch, tokenizer = type(service.base.core).__name__, str(service.tokenizer_directory)
        data = {"arch": arch, "model_name": name, "tokenizer_id": tokenizer}
        more = {"model_id": body.model_id, "is_lora": True, "lora_rank": rank, "model_name": name}
        return {"type": "get_info", "model_data": data, **more}

    @routes.post("/forward_backward")
    async def forward_backward(request: Request) -> Any:
        message = pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(await request.body())
        except DecodeError as error:
            raise ConfigError(f"the body is no ForwardBackwardRequest: {error}.") from error
        values = {key: value.text or value.number for key, value in message.loss_fn_config_v2.items()}
        settings: Any = {**message.loss_fn_config, **values}

        def work(model: Model) -> bytes:
            verb = model.session.forward if message.forward_only else model.session.forward_backward
            try:
                loss_of(message.loss_fn, settings)
                return forward_backward_output(verb(data_of(message), message.loss_fn, **settings))
            except BaseException as error:
                model.failed = model.failed if message.forward_only else str(error)
                raise

        return service.in_order(message, work)

    @routes.post("/optim_step")
    async def optim_step(body: types.OptimStepRequest) -> Any:
        values = body.optim_params
        if not isinstance(values, types.AdamParams):
            raise ConfigError(f"optim_params.type is {values.type!r}: this service has AdamW.")

        def work(model: Model) -> Any:
            if (failed := model.failed) is not None:  # a part of the gradients would be another step
                model.failed = None
                model.session.drop_gradients()
                raise ConfigError(f"a forward_backward since the last step has failed ({failed}): nothing was changed.")
            betas, limit = (values.beta1, values.beta2), max(values.grad_clip_norm, 0.0)
            metrics = model.session.optim_step(values.learning_rate, betas, values.eps, values.weight_decay, limit)
            service.note(model, metrics)
            return {"metrics": {name: x for name, x in metrics.items() if math.isfinite(x)}}

        return service.in_order(body, work)


def _add_saved_weights(routes: APIRouter, service: TrainingService) -> None:
    def save(body: Any, kind: str, overwrites: bool = False) -> Any:
        def work(model: Model) -> Any:
            name = f"step_{model.session.updates}_{body.seq_id}" if body.path is None else body.path
            return {"path": service.save(model, kind, name, overwrites), "type": body.type}

        return service.in_order(body, work)

    @routes.post("/save_weights")
    async def save_weights(body: types.SaveWeightsRequest) -> Any:
        return save(body, "weights", body.overwrite)

    @routes.post("/save_weights_external")
    async def save_weights_external(body: types.SaveWeightsExternalRequest) -> Any:
        if body.age_encryption_recipients:
            raise ConfigError("age_encryption_recipients: this service does not encrypt.")
        return save(body, "external_weights")

    @routes.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: types.SaveWeightsForSamplerRequest) -> Any:
        if body.kind != "snapshot":
            raise ConfigError(f"kind is {body.kind!r}: this service samples from snapshots.")
        if body.path is not None:
            return save(body, "sampler_weights")
        number, found = body.sampling_session_seq_id or 0, {"path": None, "type": body.type}
        return service.in_order(body, lambda model: {"sampling_session_id": service.snapshot(model, number), **found})

    @routes.post("/load_weights")
    async def load_weights(body: types.LoadWeightsRequest) -> Any:
        service.check_base(body.base_model, body.optimizer_config)
        if body.session_id is not None and body.model_seq_id is not None:
            client, number = body.session_id, body.model_seq_id
            return {"request_id": service.create_model(client, number, None, 0, body.path, body.optimizer)}

        def work(model: Model) -> Any:
            model.session.load(service.saved_at(body.path), body.optimizer)
            model.failed = None  # the gradients are gone
            return {"path": body.path, "model_id": body.model_id, "type": "load_weights"}

        return service.in_order(body, work)

    @routes.get("/checkpoints")
    def all_checkpoints(offset: NonNegativeInt = 0, limit: NonNegativeInt = 100) -> Any:
        found = service.checkpoints()
        cursor = types.Cursor(offset=offset, limit=limit, total_count=len(found))
        return types.CheckpointsListResponse(checkpoints=found[offset : offset + limit], cursor=cursor)

    @routes.get("/training_runs/{run}/checkpoints")
    def run_checkpoints(run: str) -> Any:
        return types.CheckpointsListResponse(checkpoints=service.checkpoints(run))

    @routes.post("/weights_info")
    def weights_info(tinker_path: Annotated[str, Body(embed=True)]) -> Any:
        rank = saved.read_record(service.saved_at(tinker_path)).adapter.rank
        return types.WeightsInfoResponse(base_model=service.names[0], is_lora=True, lora_rank=rank)

    @routes.delete(CHECKPOINT, status_code=204)
    def delete_checkpoint(run: str, kind: str, name: str) -> None:
        service.delete(f"tinker://{run}/{kind}/{name}")

    @routes.get(CHECKPOINT + "/external_weights_urls")
    def external_weights_urls(run: str, kind: str, name: str, request: Request) -> Any:
        directory, key = service.saved_at(f"tinker://{run}/{kind}/{name}"), secrets.token_urlsafe(32)
        (service.downloads / key).symlink_to(directory)
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=URL_S)
        base, files = f"{request.url.scheme}://{request.url.netloc}{DOWNLOADS}/{key}", sorted(directory.iterdir())
        urls = {file.name: f"{base}/{file.name}" for file in files if file.name != saved.RECORD}
        return types.ExternalWeightsUrlsResponse(urls=urls, expires=expires)


def _add_samples(routes: APIRouter, service: TrainingService) -> None:
    @routes.post("/create_sampling_session")
    async def create_sampling_session(body: types.CreateSamplingSessionRequest) -> Any:
        service.check_base(body.base_model)
        directory = None if body.model_path is None else service.saved_at(body.model_path)
        name = service.create_sampler(body.session_id, body.sampling_session_seq_id, directory, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @routes.get("/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Any:
        address = service.sampler(sampler).address
        return {"sampler_id": sampler, "base_model": service.names[0], "model_path": address}

    @routes.post("/asample")
    async def asample(body: types.SampleRequest) -> Any:
        name = service.sample(body)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(body.num_samples)]}
