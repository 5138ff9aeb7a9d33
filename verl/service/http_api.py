"""The training service over HTTP, in the protocol of Tinker's SDK 0.38: routes, limits, long polls, errors.

Bodies are the SDK's own types. Work is answered at once with the id of a request, whose result is fetched by
`retrieve_future`. A failure is a result too, of the category `user` or `server`; a request that cannot be accepted is a
status of HTTP with a `detail`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hmac
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from google.protobuf.message import DecodeError, Message
from pydantic import NonNegativeInt, ValidationError
from starlette.requests import ClientDisconnect
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from verl.errors import ConfigError, NoGradients, VerlError
from verl.service import saved
from verl.service.jobs import FETCHED_S
from verl.service.service import URL_S, NotFound, TrainingService

_log = logging.getLogger(__name__)

MAX_BODY_BYTES, MAX_JSON_BYTES = 64 << 20, 8 << 20  # of training data, and of other requests
POLL_S = 30.0  # that a request for a result is held open
PREFIX = "/api/v1"
DOWNLOADS = f"{PREFIX}/downloads"
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
ALWAYS = {
    "client/config": {"parallel_fwdbwd_chunks": False},  # requests of a model come one after another
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},  # and dropped
}
Verbs = Mapping[str, tuple[type[Any], Callable[..., Any]]]  # each with the type of its bodies
VERBS: Verbs = {
    "create_model": (types.CreateModelRequest, TrainingService.create_model),
    "create_sampling_session": (types.CreateSamplingSessionRequest, TrainingService.create_sampling_session),
    "asample": (types.SampleRequest, TrainingService.sample),
    "get_info": (types.GetInfoRequest, TrainingService.get_info),
    "load_weights": (types.LoadWeightsRequest, TrainingService.load_weights),
}
OF_MODELS: Verbs = {  # computed in the order of their numbers
    "forward_backward": (pb.ForwardBackwardRequest, TrainingService.forward_backward),
    "optim_step": (types.OptimStepRequest, TrainingService.optim_step),
    "save_weights": (types.SaveWeightsRequest, TrainingService.save),
    "save_weights_external": (types.SaveWeightsExternalRequest, TrainingService.save),
    "save_weights_for_sampler": (types.SaveWeightsForSamplerRequest, TrainingService.save),
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
    app.include_router(_routes(service), prefix=PREFIX)
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
    @app.exception_handler(DecodeError)
    @app.exception_handler(ValueError)
    @app.exception_handler(VerlError)
    async def refused(request: Request, error: Exception) -> Response:
        return _failure(getattr(error, "status", 422), f"{request.url.path}: {error}")

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: RequestValidationError | ValidationError) -> Response:
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


def _routes(service: TrainingService) -> APIRouter:
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok"}

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
        rank = saved.read_record(service.saved_at(tinker_path), service.base).adapter.rank
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

    @routes.get("/samplers/{sampler}")
    async def get_sampler(sampler: str) -> Any:
        address = service.sampler(sampler).address
        return {"sampler_id": sampler, "base_model": service.names[0], "model_path": address}

    @routes.post("/{verb:path}")
    async def others(verb: str, request: Request) -> Any:
        if verb in ALWAYS:
            return ALWAYS[verb]
        if (known := VERBS.get(verb) or OF_MODELS.get(verb)) is None:
            raise NotFound("there is no such verb.")
        kind, call, content = known[0], functools.partial(known[1], service), await request.body()
        body = kind.FromString(content) if issubclass(kind, Message) else kind.model_validate_json(content)
        service.check(body)
        return call(body) if verb in VERBS else service.in_order(body, call)

    return routes
