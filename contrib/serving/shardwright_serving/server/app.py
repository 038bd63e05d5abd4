"""The HTTP interface of a worker: predictions, health, metrics and the schema of requests."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from os import _exit as end_process
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from shardwright_serving.packages.manifest import Manifest, PackageError
from shardwright_serving.server.batcher import OverloadedError, PredictionError
from shardwright_serving.server.metrics import Metrics, forget_dead_workers
from shardwright_serving.server.requests import UnfitRequestError
from shardwright_serving.server.serving import Served, Serving
from shardwright_serving.server.settings import END_CODE, Settings

LOG = logging.getLogger("uvicorn.error")  # which uvicorn shows
RESTART_CODE = 1
"""Exit code of a worker that is to be started again."""


def app_from_environment() -> FastAPI:
    """Make the application of a worker process."""
    settings = Settings.from_environment()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return make_app(settings)


def make_app(settings: Settings) -> FastAPI:
    """Make the application.

    Args:
        settings: settings of the worker.
    """
    endpoints = _Endpoints(settings)
    app = FastAPI(title="shardwright-serving", lifespan=endpoints.lifespan)
    app.add_api_route("/predict", endpoints.predict, methods=["POST"])
    app.add_api_route("/healthz", endpoints.health, methods=["GET"])
    app.add_api_route("/readyz", endpoints.ready, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    app.openapi = lambda: endpoints.openapi(app)  # type: ignore[method-assign]  # FastAPI's own way to change it
    return app


class _Endpoints:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = Metrics()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="predict")
        self._serving = Serving(settings, self._executor, self._metrics)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the package before the first request is accepted, watch it, and answer all before the end."""
        forget_dead_workers()
        await self._take_first()
        watch = asyncio.get_running_loop().create_task(self._serving.watch())
        yield
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await self._serving.close()
        self._executor.shutdown()

    async def _take_first(self) -> None:
        """Load the package. Where the server's first one is bad it ends; where a later one is, the others serve on."""
        try:
            await self._serving.take()
        except PackageError as error:
            if not self._settings.first:
                raise  # no worker of a server
            print(f"shardwright_serving: {error}", file=sys.stderr, flush=True)
            if not self._is_later():
                end_process(END_CODE)
            await asyncio.sleep(self._settings.poll_seconds)
            end_process(RESTART_CODE)

    def _is_later(self) -> bool:
        """Tell whether another package lies there than when the server was started."""
        try:
            return Manifest.read(self._settings.folder).version != self._settings.first
        except PackageError:
            return True

    async def predict(self, request: Request) -> Response:
        """Predict. The body is JSON: `features`, and where the package has them `weights` and `dense`."""
        begun = time.monotonic()
        try:
            body = await _body(request, self._settings)
            response = await self._answered(body)
        except HTTPException as error:
            self._metrics.requests.labels(error.status_code).inc()
            if error.status_code in _OF_CLIENTS:
                host, port = request.client or ("a client", 0)
                LOG.warning("%s:%s %s", host, port, error.detail)
            raise
        self._metrics.requests.labels(response.status_code).inc()
        self._metrics.request_seconds.observe(time.monotonic() - begun)
        return response

    async def _answered(self, body: bytes) -> Response:
        served = self._served()
        try:
            samples = served.reader.read(body)
            self._check_count(len(samples))
            answer = await served.batcher.submit(samples)
        except UnfitRequestError as error:
            raise HTTPException(422, error.problems) from None
        except OverloadedError as error:
            raise HTTPException(503, str(error), {"Retry-After": str(error.retry_after)}) from None
        except PredictionError as error:
            raise HTTPException(500, str(error)) from None
        names = [output.name for output in served.manifest.outputs]
        document = {
            "version": served.manifest.version,
            "outputs": dict(zip(names, answer, strict=True)),
        }
        return Response(to_json(document, inf_nan_mode="null"), media_type="application/json")

    def _check_count(self, count: int) -> None:
        if count > self._settings.max_batch:
            raise HTTPException(
                413,
                f"{count} samples in a request; at most {self._settings.max_batch} are taken: part the request, or "
                "start the server with a larger --max-batch",
            )

    def _served(self) -> Served:
        if self._serving.current is None:
            raise HTTPException(503, "no package is loaded", {"Retry-After": "1"})
        return self._serving.current

    async def health(self) -> dict[str, str | int]:
        """Tell that the worker lives, its process id, and which version it serves."""
        return {"status": "ok", "version": self._served().manifest.version, "worker": os.getpid()}

    async def ready(self) -> dict[str, str]:
        """Tell that the worker takes requests; 503 while its queue is full."""
        served = self._served()
        if served.batcher.is_full:
            raise HTTPException(503, "the queue is full", {"Retry-After": "1"})
        return {"status": "ready", "version": served.manifest.version}

    async def metrics(self) -> Response:
        """Show metrics of all workers in Prometheus's format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def openapi(self, app: FastAPI) -> dict[str, Any]:
        """Describe the interface, with the requests of the package served now."""
        document = get_openapi(title=app.title, version="1", routes=app.routes)
        schema = self._served().reader.json_schema()
        document["components"] = {**document.get("components", {}), "schemas": schema.pop("$defs", {})}
        document["paths"]["/predict"]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        return document


async def _body(request: Request, settings: Settings) -> bytes:
    """Read the body of a request, and no more of it than may be.

    Raises:
        HTTPException: it is larger (413), did not come in time (408), or the client left (499).
    """
    most = settings.max_request_bytes
    told = request.headers.get("content-length", "")
    pieces, size = [], int(told) if told.isdecimal() else 0
    if size <= most:
        size = 0
        try:
            async with asyncio.timeout(settings.max_body_seconds):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    if size > most:
                        break
        except TimeoutError:
            slow = f"sent {size} bytes of a body in {settings.max_body_seconds:g} s, and not its end"
            raise HTTPException(408, slow, _CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(_LEFT, f"left after {size} bytes of a body") from None
    if size > most:
        raise HTTPException(413, f"the body has {size} bytes or more; at most {most} are read", _CLOSE)
    return b"".join(pieces)


_CLOSE = {"Connection": "close"}
"""Header of an answer to a body that was not read to its end."""
_LEFT = 499
"""Status that nginx gives to a request whose client has left; nobody reads it but the metrics."""
_OF_CLIENTS = (408, 413, _LEFT)
"""Statuses of requests that did not arrive whole, each a line in the log."""
