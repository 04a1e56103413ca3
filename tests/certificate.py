"""A self-signed certificate, generated when needed, for tests that speak TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest

from transfer.rpc import Security

NAMES = "DNS:localhost,IP:127.0.0.1"


def made_security(token: str, folder: Path, *more: str, names: str = NAMES) -> Security:
    """The certificate covers localhost and 127.0.0.1; without openssl the test is skipped.

    more: further words for `openssl req`. names: that it covers instead.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on the PATH to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", f"subjectAltName={names}"]
    command += ["-keyout", str(key), "-out", str(cert), *more]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return Security(token, cert, cert, key)
