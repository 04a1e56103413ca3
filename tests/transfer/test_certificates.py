"""After a certificate is renewed on disk, new connections see it, on both planes."""

import asyncio
import contextlib
import dataclasses
import os
import pty
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.certificate import made_security
from tests.contract.transfer_ends import TcpEnds
from tests.transfer.children import ROOT
from tests.transfer.samples import logical_pages
from transfer import certificates, wire
from transfer.certificates import Certificate
from transfer.clock import SYSTEM_CLOCK, ManualClock
from transfer.errors import ConfigError
from transfer.handshake import parse_address
from transfer.route_feeds import RouteFeeds
from transfer.routes import RouteTable
from transfer.rpc import RpcClient, RpcServer, Security


@pytest.fixture
def old_and_new(tmp_path: Path) -> tuple[Security, Security]:
    """Two certificates; the first trusts both."""
    made = []
    for name in ("old", "new"):
        folder = tmp_path / name
        folder.mkdir()
        made.append(made_security("token-of-the-tests", folder))
    old, new = made
    assert old.cert_file is not None
    assert new.cert_file is not None
    both = tmp_path / "ca.pem"
    both.write_bytes(old.cert_file.read_bytes() + new.cert_file.read_bytes())
    return Security(old.token, both, old.cert_file, old.key_file), new


def shown_at(address: tuple[str, int]) -> str:
    return ssl.get_server_certificate(address, timeout=20.0)


def replace(old: Security, new: Security) -> None:
    """Renew as tools do: another file takes the name."""
    for here, there in ((new.key_file, old.key_file), (new.cert_file, old.cert_file)):
        assert here is not None
        assert there is not None
        fresh = there.with_suffix(".fresh")
        shutil.copy(here, fresh)
        fresh.rename(there)


async def state(_: wire.Empty) -> wire.Empty:
    return wire.Empty()


def pem(path: Path | None) -> str:
    assert path is not None
    return path.read_text()


def test_connections_for_pages_show_the_renewed_certificate(
    old_and_new: tuple[Security, Security], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = old_and_new
    before = pem(old.cert_file)
    ends = TcpEnds(sender_security=old, receiver_security=old)
    try:
        address = parse_address(ends.address)
        assert shown_at(address) == before
        assert old.key_file is not None
        kept = old.key_file.read_bytes()
        old.key_file.write_text("no key")
        for _ in range(2):
            assert shown_at(address) == before
        assert caplog.text.count("the certificate was not renewed: cannot use ") == 1
        old.key_file.write_bytes(kept)
        replace(old, new)
        assert shown_at(address) == pem(new.cert_file)
        ends.receiver.expect(1, 1, 2)
        ends.send_room(1, logical_pages(2))
        ends.until(lambda: bool(ends.diary.finished))
    finally:
        ends.close()


@pytest.mark.parametrize("flaw", ["no key identifiers", "an issuer that the CA file lacks"])
async def test_calls_and_pages_accept_the_same_certificates_whatever_python_asks_by_default(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_context = ssl.create_default_context

    def strict_context(cafile: str) -> ssl.SSLContext:
        context = made_context(cafile=cafile)
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python does from 3.13 on
        return context

    folder = tmp_path / "issuer"
    folder.mkdir()
    issuer = made_security("token-of-the-tests", folder, "-subj", "/CN=issuer")
    words = ["-CA", str(issuer.cert_file), "-CAkey", str(issuer.key_file)]
    if flaw == "no key identifiers":
        monkeypatch.setattr(ssl, "create_default_context", strict_context)
        words += ["-addext", "authorityKeyIdentifier=none", "-addext", "subjectKeyIdentifier=none"]
    security = made_security("token-of-the-tests", tmp_path, *words)
    if flaw == "no key identifiers":
        security = dataclasses.replace(security, ca_file=issuer.cert_file)
    server = RpcServer(security)
    server.unary("State", wire.Empty, state)
    client = RpcClient(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", security)
    ends = TcpEnds(sender_security=security, receiver_security=security)
    try:
        await client.call("State", wire.Empty(), wire.Empty, 20.0)
        ends.receiver.expect(1, 1, 2)
        ends.send_room(1, logical_pages(2))
        ends.until(lambda: bool(ends.diary.finished))
    finally:
        ends.close()
        await client.close()
        await server.stop(0.0)


async def test_control_servers_show_the_renewed_certificate(
    old_and_new: tuple[Security, Security],
) -> None:
    old, new = old_and_new
    before = pem(old.cert_file)
    server = RpcServer(old)
    server.unary("State", wire.Empty, state)
    port = await server.start("127.0.0.1", 0)
    client = RpcClient(f"127.0.0.1:{port}", old)
    try:
        assert await asyncio.to_thread(shown_at, ("127.0.0.1", port)) == before
        await client.call("State", wire.Empty(), wire.Empty, 20.0)
        replace(old, new)
        assert await asyncio.to_thread(shown_at, ("127.0.0.1", port)) == pem(new.cert_file)
        late = RpcClient(f"127.0.0.1:{port}", old)
        for each in (client, late):  # the open connection continues to work
            await each.call("State", wire.Empty(), wire.Empty, 20.0)
        assert old.key_file is not None
        old.key_file.unlink()
        assert await asyncio.to_thread(shown_at, ("127.0.0.1", port)) == pem(new.cert_file)
        await late.close()
    finally:
        await client.close()
        await server.stop()


@contextlib.asynccontextmanager
async def a_port_for(what: str, security: Security) -> AsyncIterator[int]:
    """The port of a server for `what` that shows the certificate."""
    async with contextlib.AsyncExitStack() as stack:
        match what:
            case "pages":
                ends = TcpEnds(sender_security=security, receiver_security=security)
                stack.callback(ends.close)
                yield parse_address(ends.address)[1]
            case "routes":
                feeds = RouteFeeds(RouteTable(), security, SYSTEM_CLOCK, lambda *_: False)
                stack.push_async_callback(feeds.stop)
                yield await feeds.start("127.0.0.1", 0)
            case _:
                server = RpcServer(security)
                stack.push_async_callback(server.stop, 0.0)
                yield await server.start("127.0.0.1", 0)


@pytest.mark.parametrize("flaw", ["no name of ours", "not for servers"])
@pytest.mark.parametrize("what", ["pages", "routes", "calls"])
async def test_a_new_certificate_that_peers_would_not_take_is_told_of_and_the_old_one_serves_on(
    what: str,
    flaw: str,
    old_and_new: tuple[Security, Security],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = old_and_new
    if flaw == "no name of ours":
        old = old.reached_by({"--host": "127.0.0.1"})
        wrong = made_security(old.token, tmp_path, names="DNS:localhost,IP:127.0.0.2")
    else:
        wrong = made_security(old.token, tmp_path, "-addext", "extendedKeyUsage=clientAuth")
    before = pem(old.cert_file)
    async with a_port_for(what, old) as port:
        address = ("127.0.0.1", port)
        assert await asyncio.to_thread(shown_at, address) == before
        replace(old, wrong)
        for _ in range(2):
            assert await asyncio.to_thread(shown_at, address) == before
        told = f"the certificate was not renewed: peers would not take {old.cert_file}: "
        assert caplog.text.count(told) == 1
        replace(old, new)
        assert await asyncio.to_thread(shown_at, address) == pem(new.cert_file)


@pytest.mark.parametrize("what", ["pages", "calls"])
async def test_a_new_certificate_that_could_not_be_used_is_tried_again_later(
    what: str, old_and_new: tuple[Security, Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be valid yet where the clock of its issuer is ahead: no file changes then."""
    clock = ManualClock()
    monkeypatch.setattr(certificates, "SYSTEM_CLOCK", clock)
    old, new = old_and_new
    before = pem(old.cert_file)
    async with a_port_for(what, old) as port:
        address = ("127.0.0.1", port)
        replace(old, new)
        assert old.key_file is not None
        stamp = old.key_file.stat()
        kept = old.key_file.read_bytes()
        old.key_file.write_text("no key")
        stamps = (stamp.st_atime_ns, stamp.st_mtime_ns)
        os.utime(old.key_file, ns=stamps)
        assert await asyncio.to_thread(shown_at, address) == before
        old.key_file.write_bytes(kept)
        os.utime(old.key_file, ns=stamps)
        clock.advance(9.0)
        assert await asyncio.to_thread(shown_at, address) == before
        clock.advance(1.0)
        assert await asyncio.to_thread(shown_at, address) == pem(new.cert_file)


def test_a_pair_that_does_not_fit_is_refused_at_the_start(
    old_and_new: tuple[Security, Security],
) -> None:
    old, new = old_and_new
    assert old.cert_file is not None
    assert new.key_file is not None
    with pytest.raises(ConfigError, match=f"cannot use {old.cert_file} with {new.key_file}"):
        Certificate(old.cert_file, new.key_file)


def test_an_encrypted_key_is_told_of_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    """OpenSSL would ask at the terminal, and the process would wait until somebody answers."""
    ours = made_security("token-of-the-tests", tmp_path)
    assert ours.cert_file is not None
    assert ours.key_file is not None
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(ours.key_file), "-aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True, timeout=60)
    program = (
        "import fcntl, sys, termios; from pathlib import Path\n"
        "from transfer.certificates import Certificate\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "Certificate(*map(Path, sys.argv[1:]))\n"
    )
    main, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, ours.cert_file, locked],
            stdin=terminal,
            capture_output=True,
            cwd=ROOT,
            start_new_session=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(main)
        os.close(terminal)
    assert b"ConfigError: cannot use " in done.stderr


def test_a_certificate_is_asked_for_the_hosts_that_peers_reach_it_by(tmp_path: Path) -> None:
    ours = made_security("token-of-the-tests", tmp_path)
    ours.reached_by({"--host": "127.0.0.1", "--data-host": "localhost"})
    Security(ours.token).reached_by({"--host": "anywhere"})
    for host in ("127.0.0.2", "::1", "worker.example", ".no-name"):
        with pytest.raises(ConfigError, match=rf"--host {host} is how .*{ours.cert_file}: "):
            ours.reached_by({"--host": host})


def test_who_issued_a_certificate_is_for_peers_to_ask(
    old_and_new: tuple[Security, Security],
) -> None:
    old, new = old_and_new
    other_ca = Security(old.token, new.ca_file, old.cert_file, old.key_file)
    other_ca.reached_by({"--host": "localhost"})
