"""AntDT: the data-shard service, its client, and stragglers (docs/antdt.md). No torch here."""

from gmeta.access.errors import AntdtError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.lease import END, EndOfEpoch, Lease, WaitFor
from gmeta.antdt.client.stream import ShardFeed, UnitStream
from gmeta.antdt.errors import FencedError, LeaseLostError, ServiceUnavailableError
from gmeta.antdt.manifests.shard_manifest import ShardManifest, load_manifest
from gmeta.antdt.model import DatasetSpec

__all__ = [
    "END",
    "AntdtError",
    "DatasetSpec",
    "EndOfEpoch",
    "FencedError",
    "Lease",
    "LeaseLostError",
    "ServiceUnavailableError",
    "ShardClient",
    "ShardFeed",
    "ShardManifest",
    "UnitStream",
    "WaitFor",
    "load_manifest",
]
