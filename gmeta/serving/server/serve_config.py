"""How one server runs; `gmeta serve --help` explains each setting."""

from dataclasses import dataclass, field
from pathlib import Path

from gmeta.access.address import split_address
from gmeta.access.credentials import is_loopback
from gmeta.access.protection import NOTHING, Protection
from gmeta.errors import UserError
from gmeta.serving.server.server_limits import BatchLimits, RequestLimits

DEFAULT_ADDRESS = "127.0.0.1:8080"
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServeConfig(Protection):
    """Everything that a worker process needs to know; it travels to it as a pickle."""

    folder: Path | str  # an export or a channel; text is the URL of a channel
    name: str
    listen: str = DEFAULT_ADDRESS
    grpc_listen: str = ""
    workers: int = 1
    threads: int = 1  # of torch, in each worker
    limits: RequestLimits = field(default_factory=RequestLimits)
    batch: BatchLimits = field(default_factory=BatchLimits)
    max_connections: int = 1024  # of each worker
    cache_bytes: int = 256 << 20  # of each worker, and of the rows that all share
    cache_ttl_s: float = 3600.0
    reload_every_s: float = 2.0  # 0: never
    drain_s: float = 20.0
    drain_delay_s: float = 0.0  # not ready, and still answering
    verify: bool = True
    access_log: bool = True
    insecure: bool = False
    behind_proxy: bool = False
    shared_file: Path | None = None  # of the support rows that all workers share

    @property
    def addresses(self) -> dict[str, str]:
        """Return the addresses to listen on, by their option."""
        addresses_by_option = {"--listen": self.listen, "--grpc": self.grpc_listen}
        return {option: address for option, address in addresses_by_option.items() if address}

    def url(self, port: int) -> str:
        """Return where this machine's browser finds the server, which listens on `port`."""
        host = split_address("--listen", self.listen)[0].strip("[]")
        host = "localhost" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}"

    def check(self) -> None:
        """Raise UserError for an address that is malformed, or that strangers could reach."""
        # A malformed address is refused whatever protects the server.
        hosts = {option: split_address(option, at)[0] for option, at in self.addresses.items()}
        if self.workers > 1:
            for option, address in self.addresses.items():
                # Each worker binds for itself: port 0 would give each of them another port.
                if split_address(option, address)[1] == 0:
                    raise UserError(
                        f"{option} {address} takes any free port, which --workers {self.workers} "
                        "cannot share. Name a port"
                    )
        if self.insecure and self.behind_proxy:
            raise UserError("--insecure and --behind-proxy exclude each other. Pass one of them")
        if (self.insecure or self.behind_proxy) and self.protection != NOTHING:
            option = "--insecure" if self.insecure else "--behind-proxy"
            raise UserError(
                f"{option} was given beside {self.protection}; a server is the one or the other. "
                f"Leave out {option}, or the rest"
            )
        if self.secured or self.behind_proxy:
            return
        if not self.insecure:
            alone = self.protection
            alone = "nothing protects" if alone == NOTHING else f"{alone} alone does not protect"
            raise UserError(
                f"{alone} this server: pass --insecure to answer callers of this machine; or "
                "--tls-cert, --tls-key and one of --tokens and --tls-client-ca; or --behind-proxy "
                "where a proxy or mesh in front does both"
            )
        for option, host in hosts.items():
            if not is_loopback(host):
                raise UserError(
                    f"{option} {self.addresses[option]} can be reached from other machines, and "
                    "--insecure is for this one. Listen on 127.0.0.1; or pass --tls-cert, "
                    "--tls-key and --tokens; or --behind-proxy where a proxy or mesh in front "
                    "does both"
                )
