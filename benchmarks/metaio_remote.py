"""Speed over a slow remote: an HTTP server on localhost that answers every request 50 ms late.

The same dataset is read from the local disk and through the server, shuffled, in batches of 1,024
episodes, with the same threads. Blocks are decoded anew in each epoch (the cache holds fewer than
there are). The server runs in a process of its own but on the same cores. Needs aiohttp (extra
dev), as fsspec's http does."""

import argparse
import http.server
import multiprocessing
import os
import sys
import tempfile
import time
from http import HTTPStatus
from multiprocessing.connection import Connection
from pathlib import Path

from _common import environment, finish, make_parser, positive_int, print_table, spread_of
from _metaio_logs import logs_schema, write_logs

import metaio
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions

EPISODES = 1_024
CACHE_BYTES = 384 << 20
WINDOW_BLOCKS = 4


class SlowHandler(http.server.BaseHTTPRequestHandler):
    """GET with a byte range, and HEAD; late."""

    protocol_version = "HTTP/1.1"
    root = ""
    delay_s = 0.0

    def do_HEAD(self) -> None:
        time.sleep(self.delay_s)
        path = self.root + self.path
        if not os.path.isfile(path):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._start(HTTPStatus.OK, os.path.getsize(path))

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        path = self.root + self.path
        if not os.path.isfile(path):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        size = os.path.getsize(path)
        begin, end = 0, size
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            # The last byte of a range counts; it may lie behind the end of the file.
            begin, end = int(first), min(int(last) + 1 if last else size, size)
        self._start(HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK, end - begin)
        with open(path, "rb") as file:
            # sendfile goes past the buffer, in which the headers may still stand.
            self.wfile.flush()
            sent = begin
            while sent < end:
                sent += os.sendfile(self.connection.fileno(), file.fileno(), sent, end - sent)

    def _start(self, status: HTTPStatus, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def serve(root: str, delay_s: float, channel: Connection) -> None:
    """The server's process; sends its port, then serves until it is killed."""
    SlowHandler.root, SlowHandler.delay_s = root, delay_s
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    server.daemon_threads = True
    channel.send(server.server_port)
    server.serve_forever()


def epoch_rate(dataset: metaio.Dataset, epoch: int, threads: int) -> tuple[float, int]:
    """Million rows/s of one shuffled epoch, and its rows."""
    with metaio.BatchReader(
        dataset,
        "train",
        tasks_per_step=EPISODES,
        window_blocks=WINDOW_BLOCKS,
        threads=threads,
        cache_bytes=CACHE_BYTES,
    ) as reader:
        begin_s = time.perf_counter()
        rows = sum(batch.num_rows for batch in reader.batches(epoch))
    return rows / (time.perf_counter() - begin_s) / 1e6, rows


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Reads the dataset from both places by turns; the exit code."""
    rows = options.rows or (600_000 if options.quick else 3_000_000)
    rounds = options.rounds or (2 if options.quick else 5)
    write_logs(folder / "logs.parquet", rows)
    prepare([str(folder / "logs.parquet")], str(folder / "data"), logs_schema(), PrepareOptions())
    # A forked child of a process with threads may inherit a lock that nobody will ever release.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(
        target=serve, args=(str(folder), options.delay_ms / 1000, sender), daemon=True
    )
    server.start()
    try:
        url = f"http://127.0.0.1:{receiver.recv()}/data"
        places = {"local": str(folder / "data"), "remote": url}
        datasets = {name: metaio.open_dataset(place) for name, place in places.items()}
        rates: dict[str, list[float]] = {name: [] for name in places}
        for epoch in range(rounds):
            for name, dataset in datasets.items():
                rates[name].append(epoch_rate(dataset, epoch, options.threads)[0])
    finally:
        server.kill()
        server.join()
    spreads = {name: spread_of(values) for name, values in rates.items()}
    print_table(
        ("million rows/s", "median", "lowest", "highest"),
        [(n, f"{s.median:.2f}", f"{s.lowest:.2f}", f"{s.highest:.2f}") for n, s in spreads.items()],
    )
    finish(
        "metaio_remote",
        {
            "rows": rows,
            "delay_ms": options.delay_ms,
            "threads": options.threads,
            "remote_to_local": spreads["remote"].median / spreads["local"].median,
            **environment(("pyarrow", "fsspec", "numpy")),
        },
    )
    return 0


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=positive_int, help="rows of the log")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--delay-ms", type=positive_int, default=50, help="of each request")
    options = parser.parse_args()
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        print("aiohttp is not installed (pip install aiohttp): nothing measured", file=sys.stderr)
        finish("metaio_remote", {"skipped": "aiohttp is not installed"})
        return 0
    with tempfile.TemporaryDirectory(prefix="metaio-remote-") as name:
        return measure(options, Path(name))


if __name__ == "__main__":
    sys.exit(main())
