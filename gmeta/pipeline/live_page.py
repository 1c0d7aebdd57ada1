"""What a loop shows: the page of its stream as a file, and an address with the page as it is now,
metrics for Prometheus, and /healthz for probes."""

import threading
from pathlib import Path
from typing import final

from prometheus_client.exposition import choose_encoder

from gmeta.access.address import split_address
from gmeta.access.auth import Tokens
from gmeta.access.credentials import ServerTls
from gmeta.access.http_edge import HttpRequest, RouteServer
from gmeta.errors import GMetaError, UserError
from gmeta.pipeline.pipeline import Loop
from gmeta.pipeline.pipeline_metrics import LoopMetrics
from gmeta.pipeline.stream_page import Picture, draw_stream, page_of, stream_page
from gmeta.platform.files.atomic_write import write_atomically
from gmeta_keys.translate_errors import failing_as, kind_and_text
from metaio.errors import MetaIOError

_REFRESH_S = 10


def draw_page(path: Path, loop: Loop, metrics: LoopMetrics) -> None:
    """Write the page of the stream's state now to a file, which takes a second."""
    write_atomically(path, stream_page(loop, metrics.status).encode())


@final
class LivePage:
    """Serves a loop's page and metrics in threads of its own. A picture is drawn when somebody
    looks, once for each stage that ended."""

    def __init__(
        self,
        loop: Loop,
        metrics: LoopMetrics,
        address: str,
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Listen at HOST:PORT. Raise AddressError, CredentialError or, where the port is taken,
        UserError."""
        self._loop, self._metrics = loop, metrics
        self._picture: Picture | None = None
        self._drawing = threading.Lock()
        host, port = split_address("--listen", address)
        routes = {"/": self._page, "/metrics": self._measured}
        try:
            self._server = RouteServer(host, port, routes, lambda: True, tls, tokens)
        except OSError as error:
            raise UserError(
                f"cannot listen on {address}: {error.strerror}. Choose another --listen"
            ) from error
        self.port = self._server.start()

    def redraw(self) -> None:
        """Draw anew when somebody looks next: a stage has ended."""
        with self._drawing:
            self._picture = None

    def stop(self) -> None:
        """End at once."""
        self._server.stop()

    def _page(self, request: HttpRequest) -> None:
        try:
            text = self._drawn()
        except (GMetaError, MetaIOError) as error:
            request.send(500, f"the page cannot be drawn: {error}\n")
            return
        headers = {"Cache-Control": "no-store"}
        request.send(200, text, headers, "text/html; charset=utf-8")

    def _drawn(self) -> str:
        with (
            failing_as(_defect, GMetaError, MetaIOError),
            self._drawing,
        ):
            picture = self._picture = self._picture or draw_stream(self._loop)
            return page_of(picture, self._metrics.status, self._loop.under_way, _REFRESH_S)

    def _measured(self, request: HttpRequest) -> None:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        request.send(200, encode(self._metrics.registry), content_type=content_type)


def _defect(error: Exception) -> GMetaError:
    told = kind_and_text(error).rstrip(".")
    return GMetaError(f"{told}. That is a defect; report it with its traceback")
