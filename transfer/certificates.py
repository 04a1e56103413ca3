"""The certificate that a process shows to its peers, reloaded when its files change."""

import contextlib
import logging
import ssl
from pathlib import Path

import grpc

from transfer.complaint import Complaint
from transfer.errors import ConfigError

log = logging.getLogger(__name__)


class Certificate:
    """A certificate and its key, in PEM files.

    Connections that begin after the files were replaced see the new certificate; open connections
    keep theirs. If the new files cannot be used, a warning is logged and the old certificate stays.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        """Raises ConfigError when the files cannot be used."""
        self._cert_file = cert_file
        self._key_file = key_file
        self._complaint = Complaint(log, "the certificate was not renewed")
        self._seen = self._stamps()
        self._context = self._load()

    def ssl_context(self) -> ssl.SSLContext:
        """The context of a TLS server that shows the newest certificate."""
        self._context.sni_callback = self._choose
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for a gRPC server."""
        return grpc.dynamic_ssl_server_credentials(self._pair(), self._renewed_pair)

    # --- for each handshake -----------------------------------------------------------------------

    def _choose(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        if self._is_renewed():
            try:
                self._context = self._load()
                self._told()
            except ConfigError as error:
                self._complaint.tell(error)
        connection.context = self._context

    def _renewed_pair(self) -> "grpc.ServerCertificateConfiguration | None":
        """The new pair, or None: gRPC keeps what it has, as with a pair that does not match."""
        if not self._is_renewed():
            return None
        try:
            self._load()
            pair = self._pair()
        except ConfigError as error:
            self._complaint.tell(error)
            return None
        self._told()
        return pair

    def _told(self) -> None:
        self._complaint.settle()
        log.info("the certificate in %s was renewed", self._cert_file)

    def _is_renewed(self) -> bool:
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        return True

    # --- files ------------------------------------------------------------------------------------

    def _stamps(self) -> list[tuple[int, int] | None]:
        """Stamps that change when a file is written or replaced; None for a missing file."""
        stamps: list[tuple[int, int] | None] = []
        for path in (self._cert_file, self._key_file):
            try:
                found = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_mtime_ns, found.st_ino))
        return stamps

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An empty password: without one, an encrypted key would ask at the terminal.
            context.load_cert_chain(str(self._cert_file), str(self._key_file), password="")
        except (OSError, ValueError) as error:
            names = f"{self._cert_file} with {self._key_file}"
            raise ConfigError(f"cannot use {names}: {error}") from error
        return context

    def _pair(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(read_pem(self._key_file), read_pem(self._cert_file))]
        )


def check_shown(cert_file: Path, key_file: Path, host: str | None = None) -> None:
    """Check that peers connecting to this host would accept the certificate, its issuer aside.

    host: None where the name by which peers connect is not known, and so not checked. Raises
    ConfigError, with the reason that TLS gives, if not.
    """
    ours = Certificate(cert_file, key_file).ssl_context()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = host is not None
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate vouches for itself
    theirs.load_verify_locations(str(cert_file))
    to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = ours.wrap_bio(to_us, to_them, server_side=True)
    try:
        client = theirs.wrap_bio(to_them, to_us, server_hostname=host)
        for end in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ValueError as error:  # host is no name, or the certificate does not have it
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error
        raise ConfigError(f"peers would not take {cert_file}: {why}") from error


def read_pem(path: Path) -> bytes:
    """The bytes of a PEM file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
