"""Certificate authorities and short-lived certificates, made on the spot."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Pair = tuple[Path, Path]  # certificate, key
_RIGHTS = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
_RIGHTS += ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
_SIGNS_CERTIFICATES = x509.KeyUsage(**{name: name == "key_cert_sign" for name in _RIGHTS})


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class Authority:
    """Signs certificates into a folder; `ca` is its own."""

    folder: Path
    name: str = "gmeta test authority"
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca = self.folder / "ca.crt"
        made = self._sign(
            x509.CertificateBuilder()
            .subject_name(_name(self.name))
            .public_key(self.key.public_key())
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
        )
        self.ca.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, role: str = "", days: float = 1.0, address: str = "",
        host: str = "localhost",
    ) -> Pair:  # fmt: skip
        """A certificate for `host` and `address` with the role's URI; expired if `days` < 0."""
        names: list[x509.GeneralName] = [
            x509.DNSName(host),
            x509.IPAddress(ip_address("127.0.0.1")),
        ]
        if address:
            names.append(x509.IPAddress(ip_address(address)))
        if role:
            names.append(x509.UniformResourceIdentifier(f"spiffe://test/gmeta/{role}"))
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        cert_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert_file.write_bytes(self._sign(builder, days).public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_file, key_file

    def _sign(self, builder: x509.CertificateBuilder, days: float = 1.0) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            builder.issuer_name(_name(self.name))
            # Python 3.13 wants to know which key signed.
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=days))
            .sign(self.key, hashes.SHA256())
        )
