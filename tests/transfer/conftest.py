"""TLS material generated for the tests, and ends that share memory."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.certificate import made_security
from tests.contract.transfer_ends import ShmEnds
from tests.transfer.samples import SECURITY
from tests.transfer.shm_ends import OpenEnds, mapped, wait_until
from transfer.rpc import Security


@pytest.fixture(scope="session")
def tls_security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    """The tests' token, and a self-signed certificate for localhost and 127.0.0.1."""
    return made_security(SECURITY.token, tmp_path_factory.mktemp("tls"))


@pytest.fixture
def open_shm_ends() -> Iterator[OpenEnds]:
    """Makes pairs of ends that share memory, and closes them after the test."""
    wait_until(lambda: mapped() == 0)  # threads of the previous test end in their own time
    with contextlib.ExitStack() as stack:

        def make(**changes: object) -> ShmEnds:
            return stack.enter_context(contextlib.closing(ShmEnds(**changes)))  # type: ignore[arg-type]

        yield make
