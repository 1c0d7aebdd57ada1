"""Which data-shard service a job talks to: the config's, else the environment's, else its own."""

from pathlib import Path
from typing import Any

import pytest

from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig
from gmeta.feeds import service as shard_service
from gmeta.feeds.service import SERVICE_VARIABLE, connect, needs_own_service, service_address


def job(source: Any, service: str = "") -> TrainConfig:
    return TrainConfig(data=DataConfig(source=source, service=service), run=RunConfig(dir="run"))


@pytest.mark.parametrize(
    ("of_config", "of_environment", "address"),
    [("", None, ""), ("", "b:2", "b:2"), ("a:1", None, "a:1"), ("a:1", "b:2", "a:1")],
)
def test_the_configs_address_goes_before_the_environments(
    monkeypatch: pytest.MonkeyPatch, of_config: str, of_environment: str | None, address: str
) -> None:
    if of_environment is None:
        monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SERVICE_VARIABLE, of_environment)
    config = job("service", of_config)
    assert service_address(config.data) == address
    assert needs_own_service(config.data) == (not address)


def test_a_job_that_leases_no_shards_needs_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    assert not needs_own_service(job("static").data)


def test_a_rank_keeps_and_shows_the_environments_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        shard_service, "ShardClient", lambda *names, **files: given.append((names, files))
    )
    for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"GMETA_SHARD_{name}", raising=False)
    connect("a:1", rank=3)
    monkeypatch.setenv("GMETA_SHARD_TOKEN_FILE", "/run/token")
    monkeypatch.setenv("GMETA_SHARD_TLS_CA", "")  # as good as not set
    connect("a:1", rank=3)
    none = dict.fromkeys(("token_file", "tls_ca", "tls_cert", "tls_key"))
    assert given == [
        (("a:1", "rank3"), none),
        (("a:1", "rank3"), {**none, "token_file": Path("/run/token")}),
    ]
