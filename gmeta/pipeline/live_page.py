"""Shows a loop: the page of its stream, as a file or served, with its metrics and /healthz."""

import threading
from pathlib import Path
from typing import final

from prometheus_client.exposition import choose_encoder

from gmeta.access.address import split_address
from gmeta.access.auth import Tokens
from gmeta.access.credentials import ServerTls
from gmeta.access.http_edge import HttpRequest, RouteServer
from gmeta.errors import GMetaError, UserError
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.pipeline.stream_page import StreamPicture, draw_stream, render_page, render_stream
from gmeta.platform.files.atomic_write import write_atomically
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from metaio.errors import MetaIOError

# Seconds after which a browser loads the page again.
_REFRESH_S = 10


def write_page(path: Path, pipeline: Pipeline, metrics: PipelineMetrics) -> None:
    """Write the page of the stream's state to a file, which takes a second."""
    write_atomically(path, render_stream(pipeline, metrics.status).encode())


@final
class StreamPageServer:
    """Serves a loop's page and metrics from threads of its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: PipelineMetrics,
        address: str,
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Listen at HOST:PORT. Raises AddressError, CredentialError or UserError (port in use)."""
        self._pipeline, self._metrics = pipeline, metrics
        # Drawn when a browser wants it, once for each stage that ended: drawing takes a second.
        self._picture: StreamPicture | None = None
        # Requests come in threads, and the picture must be drawn only once.
        self._drawing = threading.Lock()
        host, port = split_address("--listen", address)
        routes = {"/": self._answer_page, "/metrics": self._answer_metrics}
        try:
            self._server = RouteServer(host, port, routes, lambda: True, tls, tokens)
        except OSError as error:
            raise UserError(
                f"cannot listen on {address}: {error.strerror}. Choose another --listen"
            ) from error
        self.port = self._server.start()

    def redraw(self) -> None:
        """Have the page drawn anew at the next request, as a stage has ended."""
        with self._drawing:
            self._picture = None

    def stop(self) -> None:
        """Stop serving at once."""
        self._server.stop()

    def _answer_page(self, request: HttpRequest) -> None:
        try:
            with translate_errors(_wrap_defect, GMetaError, MetaIOError), self._drawing:
                picture = self._picture = self._picture or draw_stream(self._pipeline)
                under_way = self._pipeline.under_way
                text = render_page(picture, self._metrics.status, under_way, _REFRESH_S)
        except (GMetaError, MetaIOError) as error:
            request.send(500, f"the page cannot be drawn: {error}\n")
            return
        # The page changes with each stage.
        headers = {"Cache-Control": "no-store"}
        request.send(200, text, headers, "text/html; charset=utf-8")

    def _answer_metrics(self, request: HttpRequest) -> None:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        request.send(200, encode(self._metrics.registry), content_type=content_type)


def _wrap_defect(error: Exception) -> GMetaError:
    # An error that was not expected is answered too: the server goes on.
    reason = format_foreign_error(error).rstrip(".")
    return GMetaError(f"{reason}. That is a defect; report it with its traceback")
