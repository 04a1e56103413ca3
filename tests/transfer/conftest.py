"""TLS material made on the spot."""

import shutil
import subprocess

import pytest

from tests.transfer.samples import SECURITY
from transfer.rpc import Security


@pytest.fixture(scope="session")
def tls_security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    """The token of the tests, and a self-signed certificate for localhost and 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on the PATH to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return Security(SECURITY.token, cert, cert, key)
