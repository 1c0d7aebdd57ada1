"""Which data-shard service a training job talks to. Loads no torch: a launcher asks as well."""

import os
from pathlib import Path

from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.service.embedded import EmbeddedService
from gmeta.config.train_config import DataConfig

# The same that `gmeta shards` reads.
SERVICE_VARIABLE = "GMETA_SHARD_SERVICE"

SHARDS_FOLDER = "shards"  # in the run folder: store, log and address of the job's own service


def service_address(data: DataConfig) -> str:
    """Return HOST:PORT of the service that was named for the job; "" if it is to start its own."""
    return data.service or os.environ.get(SERVICE_VARIABLE, "")


def needs_own_service(data: DataConfig) -> bool:
    """Return whether the job must start a data-shard service for itself."""
    return data.source == "service" and not service_address(data)


def start_embedded_service(run_dir: str) -> EmbeddedService:
    """Return the job's service, its store in the run folder; it ends with this process at the
    latest."""
    return EmbeddedService(Path(run_dir) / SHARDS_FOLDER)


def connect(address: str, rank: int) -> ShardClient:
    """Return this rank's client. Raises AntdtError."""
    token_file, tls_ca, tls_cert, tls_key = (
        Path(path) if (path := os.environ.get(f"GMETA_SHARD_{name}")) else None
        for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
    )
    return ShardClient(
        address,
        # The same in every life of the job: a restarted rank takes the place of its last process.
        f"rank{rank}",
        token_file=token_file,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
