"""The HTTP surface: routes, the API key, and errors in OpenAI's shape whatever raised them."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .completions import Completions
from .errors import ApiError
from .service import Service

logger = logging.getLogger("ddtree.server")

# Probes and scrapers hold no secrets; these two tell nothing about requests or their contents.
OPEN_PATHS = frozenset({"/health", "/metrics"})


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


class ApiKey:
    """Middleware: everything but OPEN_PATHS needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            error = ApiError(
                401,
                "missing or wrong API key: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        # Digests have one length, so the time this takes tells nothing about the key, its length included.
        return scheme.lower() == b"bearer" and hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="ddtree standalone server", docs_url=None, redoc_url=None, openapi_url=None)
    options = service.options
    if options.api_key:
        app.add_middleware(ApiKey, key=options.api_key)
    completions = Completions(service)

    def model() -> dict[str, Any]:
        decoder = service.require_ready()
        return {
            "id": options.served_model_name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "ddtree",
            "max_model_len": decoder.context_length,
        }

    @app.get("/health")
    async def health() -> JSONResponse:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/get_server_info")
    async def server_info() -> JSONResponse:
        return JSONResponse(service.info() | {"uptime_seconds": round(time.time() - service.started, 3)})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSONResponse:
        if name != options.served_model_name:
            message = f"the model {name[:200]!r} does not exist; this server has {options.served_model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(model())

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await completions(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await completions(request, chat=True)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"there is no {request.url.path}; see /v1/models, /v1/completions and /v1/chat/completions",
            405: f"{request.method} is not allowed on {request.url.path}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return error_response(ApiError(500, "internal error; the server's log has the reason", code="internal_error"))

    return app
