"""The certificate that a process shows to its peers, reloaded when its files change."""

import contextlib
import logging
import math
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from transfer.clock import SYSTEM_CLOCK
from transfer.complaint import Complaint
from transfer.errors import ConfigError

log = logging.getLogger(__name__)


_AGAIN_S = 10.0  # until files that could not be used are tried again: they may be valid by then


class Certificate:
    """A certificate and its key, in PEM files.

    Connections that begin after the files were replaced see the new certificate; open connections
    keep theirs. If the new files cannot be used, or peers would not take the new certificate, a
    warning is logged and the old certificate stays.
    """

    def __init__(self, cert_file: Path, key_file: Path, hosts: Sequence[str] = ()) -> None:
        """hosts: by which peers connect, and which a new certificate must name; none: unknown.

        Raises ConfigError when the files cannot be used.
        """
        self._cert_file = cert_file
        self._key_file = key_file
        self._hosts = hosts
        self._complaint = Complaint(log, "the certificate was not renewed")
        self._again_s = math.inf
        self._seen = self._stamps()
        self._context = _loaded(cert_file, key_file)

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
                self._context = self._checked()
                self._told()
            except ConfigError as error:
                self._not_renewed(error)
        connection.context = self._context

    def _renewed_pair(self) -> "grpc.ServerCertificateConfiguration | None":
        """The new pair, or None: gRPC keeps what it has, as with a pair that does not match."""
        if not self._is_renewed():
            return None
        try:
            pair = self._pair()
            self._checked()
        except ConfigError as error:
            self._not_renewed(error)
            return None
        if self._stamps() != self._seen:
            return None  # what was checked is not what was read: the next handshake reads again
        self._told()
        return pair

    def _told(self) -> None:
        self._again_s = math.inf
        self._complaint.settle()
        log.info("the certificate in %s was renewed", self._cert_file)

    def _not_renewed(self, error: ConfigError) -> None:
        self._again_s = SYSTEM_CLOCK.monotonic_s() + _AGAIN_S
        self._complaint.tell(error)

    def _is_renewed(self) -> bool:
        """Whether there are files that were not tried yet, or not since _AGAIN_S."""
        stamps = self._stamps()
        if stamps == self._seen and SYSTEM_CLOCK.monotonic_s() < self._again_s:
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

    def _checked(self) -> ssl.SSLContext:
        """A context for the files as they are now. Raises ConfigError if peers would not take it.

        Without this, a copy of an expired certificate would keep out every peer until somebody
        looks; with it, the old one serves meanwhile.
        """
        context = _loaded(self._cert_file, self._key_file)
        for host in self._hosts or (None,):
            _check_taken(context, self._cert_file, host)
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
    _check_taken(_loaded(cert_file, key_file), cert_file, host)


def check_reached(cert_file: Path, key_file: Path, hosts: Mapping[str, str]) -> None:
    """As check_shown for each of the hosts, given by flag; the error names the flag."""
    for flag, host in hosts.items():
        try:
            check_shown(cert_file, key_file, host)
        except ConfigError as error:
            raise ConfigError(f"{flag} {host} is how peers reach us, and {error}") from error


def _loaded(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    """A server's context. Raises ConfigError when the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password: without one, an encrypted key would ask at the terminal.
        context.load_cert_chain(str(cert_file), str(key_file), password="")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use {cert_file} with {key_file}: {error}") from error
    return context


def _check_taken(ours: ssl.SSLContext, cert_file: Path, host: str | None) -> None:
    """As check_shown, for a context that shows what is in cert_file."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = host is not None
    theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate vouches for itself
    to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = ours.wrap_bio(to_us, to_them, server_side=True)
    try:
        theirs.load_verify_locations(str(cert_file))
        client = theirs.wrap_bio(to_them, to_us, server_hostname=host)
        for end in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except (OSError, ValueError) as error:  # the host is no name, or not in the file, or ...
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error
        raise ConfigError(f"peers would not take {cert_file}: {why}") from error


def read_pem(path: Path) -> bytes:
    """The bytes of a PEM file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
