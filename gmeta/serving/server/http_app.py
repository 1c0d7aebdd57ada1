"""The server's HTTP side: the Open Inference Protocol, /metrics, /status, /docs, /openapi.json."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gmeta.platform.pages.page_kit import read_scripted_page
from gmeta.serving.server.access import Right
from gmeta.serving.server.http_connection import ADMIT, CERTIFICATE
from gmeta.serving.server.inference_protocol import (
    BINARY_HEADER,
    InferenceRequest,
    parse_http,
    render_http,
)
from gmeta.serving.server.openapi_document import list_endpoints, make_openapi_document
from gmeta.serving.server.request_errors import CallerLeftError, RequestError

if TYPE_CHECKING:
    from gmeta.serving.server.inference_service import InferenceService


# The page is one file of ours: nothing else may run in it or be fetched by it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _CloseWhileDraining:
    """Tells callers to close their connections once the server is not ready."""

    def __init__(self, app: ASGIApp, service: InferenceService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A kept connection would end under a request that its caller has just sent.
        async def send_with_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send if self._service.ready else send_with_close)


def http_app(service: InferenceService) -> FastAPI:
    """Return the app of a service."""
    # redirect_slashes would name the address that a proxy in front has reached.
    no_pages: Any = dict.fromkeys(("docs_url", "redoc_url", "openapi_url"))
    app = FastAPI(title="gmeta", redirect_slashes=False, **no_pages)
    page = read_scripted_page(__package__)

    async def live(request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    async def model_ready(request: Request) -> Response:
        service.check_model(*_model(request))
        body = {"name": service.config.name, "ready": service.ready}
        return JSONResponse(body, 200 if service.ready else 503)

    async def server(request: Request) -> Response:
        check(request, Right.METADATA)
        return JSONResponse(service.server_metadata())

    async def model(request: Request) -> Response:
        check(request, Right.METADATA)
        service.check_model(*_model(request))
        return JSONResponse(service.model_metadata())

    async def infer(request: Request) -> Response:
        peer = f"{request.client.host}:{request.client.port}" if request.client else ""
        inference, answer = await service.infer(
            "http",
            *_model(request),
            dict(request.headers),
            peer,
            lambda: check(request, Right.INFER),
            partial(_read_inference, request, service),
        )
        body, headers = render_http(service.config.name, inference, answer)
        return Response(body, headers=headers)

    async def metrics(request: Request) -> Response:
        check(request, Right.LOOK)
        service.measure()
        body, content_type = service.metrics.page(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def status(request: Request) -> Response:
        check(request, Right.LOOK)
        return JSONResponse(service.status())

    async def docs(request: Request) -> Response:
        check(request, Right.LOOK)
        # Inside <script> a text of "</script>" would end it.
        now = json.dumps(_describe_service(service)).replace("<", "\\u003c")
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        content_type = "text/html; charset=utf-8"
        return Response(page.replace("NOW", now, 1), headers=headers, media_type=content_type)

    async def root(request: Request) -> Response:
        # A person's browser is led to the page; to a program no such path is known, as ever.
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        # Relative: a redirect with an address would name the one that a proxy in front has reached.
        return RedirectResponse("docs")

    async def openapi(request: Request) -> Response:
        check(request, Right.METADATA)
        return JSONResponse(_make_document(service))

    def check(request: Request, right: Right) -> None:
        uris, valid_until_s = _read_certificate(request)
        authorization = request.headers.get("authorization", "")
        service.access.check(right, authorization, uris, valid_until_s)
        # After the proof: strangers take no place of those who have one.
        admit = request.scope.get("extensions", {}).get(ADMIT)
        if admit is not None and not admit():
            raise RequestError(
                503,
                f"this worker has more than {service.config.max_connections} connections. Call "
                "another server, or start more workers, or with a higher --max-connections",
            )

    for place in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        app.add_route(f"{place}/infer", infer, methods=["POST"])
        app.add_route(f"{place}/ready", model_ready)
        app.add_route(place, model)
    for place in ("/v2", "/v2/"):  # clients call the first, the protocol's schema has the second
        app.add_route(place, server)
    app.add_route("/v2/health/live", live)
    app.add_route("/v2/health/ready", ready)
    app.add_route("/metrics", metrics)
    app.add_route("/status", status)
    app.add_route("/docs", docs)
    app.add_route("/openapi.json", openapi)
    app.add_route("/", root)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_no_route)
    app.add_exception_handler(CallerLeftError, _answer_caller_left)
    app.add_middleware(_CloseWhileDraining, service=service)
    return app


def _model(request: Request) -> tuple[str, str]:
    """Return the name and the version in the path; empty: any."""
    return request.path_params["name"], request.path_params.get("version", "")


async def _read_inference(
    request: Request, service: InferenceService, hold: Callable[[int], None]
) -> InferenceRequest:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            415,
            f"the body has Content-Encoding {encoding[:40]!r}; only identity is read. Send it "
            "uncompressed",
        )
    limits, columns = service.config.limits, service.loaded.columns
    body = await _read_body(request, limits.body_bytes, service.config.batch.timeout_s, hold)
    header_length = request.headers.get(BINARY_HEADER)
    return await service.parse(len(body), partial(parse_http, columns, body, header_length, limits))


async def _read_body(
    request: Request, max_bytes: int, timeout_s: float, hold: Callable[[int], None]
) -> bytes:
    too_large = RequestError(
        413,
        f"the body has more than {max_bytes} bytes, the most that is allowed. Split the request, "
        "or start the server with a higher --max-body",
    )
    # A client that sends "Expect: 100-continue" waits with its body: it can be refused before.
    declared = request.headers.get("content-length", "0")
    # 20 digits are beyond any limit, and Python refuses to convert thousands.
    is_large = declared.isdecimal() and int(declared[:20]) > max_bytes
    if is_large and "expect" in request.headers:
        raise too_large
    parts, size, refusal = [], 0, None
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                # To its end: a client that still sends when the connection closes reads no answer.
                if refusal is None:
                    parts.append(part)
                    size += len(part)
                    try:
                        if size > max_bytes:
                            raise too_large
                        hold(size)
                    except RequestError as error:
                        refusal = error
                        parts.clear()
    except TimeoutError:
        refusal = refusal or RequestError(
            408, f"the body did not come within {timeout_s:g} s. Send it faster, or split it"
        )
    except ClientDisconnect:
        raise CallerLeftError from None
    if refusal is not None:
        raise refusal
    return b"".join(parts)


def _read_certificate(request: Request) -> tuple[list[str] | None, float]:
    """Return the URIs of the client's certificate, and when it expires; None without one."""
    certificate = request.scope.get("extensions", {}).get(CERTIFICATE)
    if not certificate:
        return None, 0.0
    uris = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    return uris, ssl.cert_time_to_seconds(certificate["notAfter"])


def _make_document(service: InferenceService) -> dict[str, Any]:
    return make_openapi_document(service.config, service.loaded.version, service.loaded.columns)


def _describe_service(service: InferenceService) -> dict[str, Any]:
    columns, config = service.loaded.columns, service.config
    needed = {column.name for column in columns.read}
    return {
        **service.status(),
        "item": columns.item,
        "outputs": [output._asdict() for output in columns.outputs],
        "columns": [
            # As texts: JavaScript has no integers of 64 bits.
            {**vars(column), "examples": [*map(str, column.examples)], "needed": name in needed}
            for name, column in columns.by_name.items()
        ],
        "endpoints": list_endpoints(_make_document(service)),
        "proofs": {"token": bool(config.tokens), "certificate": bool(config.tls_client_ca)},
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    # Starlette types any handler for Exception, and calls this one for what it was added for.
    assert isinstance(error, RequestError)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        # Basic, too: what a browser can ask for, with the token as the password.
        headers["www-authenticate"] = 'Basic realm="gmeta", charset="UTF-8"'
    if error.status in (408, 413, 415, 503):
        headers["connection"] = "close"  # neither the body's rest nor the caller is wanted
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _answer_no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    message = f"{request.method} {path!r} is not answered: {error.detail}. See /docs for what is"
    return JSONResponse({"error": message}, error.status_code, dict(error.headers or {}))


async def _answer_caller_left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
