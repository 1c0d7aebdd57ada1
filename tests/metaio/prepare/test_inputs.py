"""Where inputs are read from: a web server, and files whose names hold the marks of globs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.csv as pa_csv

from metaio.prepare.job import PrepareOptions
from metaio.prepare.local import prepare
from tests.metaio.prepare.test_local import changed, raw_table


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a server of the files of a folder."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_files_of_a_web_server_are_read_as_those_of_a_disk(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    table = raw_table(200)
    for part in range(2):
        pa_csv.write_csv(table.slice(100 * part, 100), tmp_path / "logs" / f"{part}.csv")
    prepare([f"{tmp_path}/logs/*.csv"], str(tmp_path / "own"), changed(), PrepareOptions(threads=1))
    with served(tmp_path / "logs") as url:
        urls = [f"{url}/0.csv", f"{url}/1.csv?signed=yes"]
        prepare(urls, str(tmp_path / "served"), changed(), PrepareOptions(threads=1))
    own, found = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.parquet")}
        for root in (tmp_path / "own", tmp_path / "served")
    )
    assert own == found
