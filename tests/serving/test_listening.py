"""Where the API listens: what is claimed, what is refused, and what is left in the end."""

import fcntl
import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from serving import listening
from serving.config import ServeConfig
from serving.listening import (
    address_of,
    beside,
    claimed,
    claimed_for_children,
    ensure_listening,
    refuse_two_addresses,
    take_no_more,
)
from tests.ports import free_port
from transfer import ports
from transfer.errors import ConfigError


def config(**values: object) -> ServeConfig:
    settings = {"model_path": Path("m"), "registry_address": "127.0.0.1:1", **values}
    return ServeConfig(**settings)  # type: ignore[arg-type]


def knock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def leave_stale(path: Path) -> None:
    """What a server that was killed leaves: a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_port_is_claimed_alone() -> None:
    with claimed(config(port=0)) as sock:
        address = address_of(sock)
        port = sock.getsockname()[1]
        assert (str(address), address.uds) == (f"http://127.0.0.1:{port}", "")
        with pytest.raises(ConfigError) as caught, claimed(config(port=port)):
            pass
        with socket.create_connection(("127.0.0.1", port)):
            pass  # it waits for the server
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in str(caught.value)


@pytest.mark.parametrize("claim", [claimed, claimed_for_children])
def test_of_two_that_were_bound_at_once_the_second_to_listen_is_refused(
    claim: Callable[[ServeConfig], AbstractContextManager[socket.socket]],
) -> None:
    port = free_port()
    with ports.bind("127.0.0.1", port, "--port") as late:
        with claim(config(port=port)):
            with pytest.raises(ConfigError) as caught:
                ports.listen(late, "127.0.0.1", port, "--port", 1)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in str(caught.value)


@pytest.mark.parametrize("claim", [claimed, claimed_for_children])
def test_a_port_held_for_children_is_nobody_elses(
    claim: Callable[[ServeConfig], AbstractContextManager[socket.socket]],
) -> None:
    port = free_port()
    with claimed_for_children(config(port=port)):
        with pytest.raises(ConfigError, match="Address already in use"), claim(config(port=port)):
            pass


@pytest.mark.parametrize("given", [0, None])
def test_children_listen_beside_their_parent_which_gets_no_connection(given: int | None) -> None:
    with claimed_for_children(config(port=free_port() if given is None else given)) as held:
        port = held.getsockname()[1]
        children = [beside(config(port=port)) for _ in range(2)]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        for child in children:
            ensure_listening(child, config(port=port))
        for _ in range(16):
            with socket.create_connection(("127.0.0.1", port)) as client:
                taker = next(child for child in select.select(children, [], [], 10)[0])
                taken, address = taker.accept()
                assert address == client.getsockname()
                taken.close()
        for child in children:
            child.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_connects_to_a_child_that_takes_no_more_gets_to_another_and_is_not_cut(
    host: str,
) -> None:
    with claimed_for_children(config(host=host, port=0)) as held, ExitStack() as stack:
        settings = config(host=host, port=held.getsockname()[1])
        leaving, staying = (stack.enter_context(beside(settings)) for _ in range(2))
        early, late = (stack.enter_context(socket.socket(held.family)) for _ in range(2))
        ensure_listening(leaving, settings)
        early.connect(held.getsockname())
        take_no_more(leaving)
        late.setblocking(False)
        late.connect_ex(held.getsockname())
        taken, address = leaving.accept()
        with taken:
            assert address == early.getsockname()
        ensure_listening(staying, settings)
        leaving.close()
        staying.settimeout(20)
        taken, address = staying.accept()
        with taken:
            assert address == late.getsockname()


def test_a_child_is_told_when_another_listens_by_now() -> None:
    port = free_port()
    with ports.bind("127.0.0.1", port, "--port") as other:
        with beside(config(port=port)) as child:
            other.listen()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
                ensure_listening(child, config(port=port))


def test_an_address_of_ipv6_has_brackets() -> None:
    with claimed(config(host="::1", port=0)) as sock:
        assert str(address_of(sock)) == f"http://[::1]:{sock.getsockname()[1]}"


def test_a_unix_socket_listens_at_once_and_goes_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "api.sock"
    with claimed(config(uds="api.sock")) as sock:
        address = address_of(sock)
        assert (str(address), address.url) == (f"unix:{path}", "http://localhost")
        knock(path)
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    leave_stale(path)
    with claimed(config(uds=str(path))):
        knock(path)
    assert not path.exists()


def test_a_live_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with claimed(config(uds=str(path))):
        with pytest.raises(ConfigError) as caught, claimed(config(uds=str(path))):
            pass
        assert str(caught.value) == (
            f"--uds {path} is in use: a server listens there; choose another path"
        )
        knock(path)


def test_a_live_socket_that_takes_nobody_in_just_now_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with ExitStack() as stack:
        busy, waiting = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))  # its backlog is full now
        with pytest.raises(ConfigError, match="is in use"), claimed(config(uds=str(path))):
            pass


def test_of_servers_that_start_at_once_one_has_the_path(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    for _ in range(20):
        leave_stale(path)
        together, over = threading.Barrier(4), threading.Event()
        begun: list[bool] = []

        def start(together: threading.Barrier, over: threading.Event, begun: list[bool]) -> None:
            together.wait(20)
            try:
                with claimed(config(uds=str(path))):
                    begun.append(True)
                    over.wait(20)
            except ConfigError:
                begun.append(False)

        args = together, over, begun
        servers = [threading.Thread(target=start, args=args) for _ in range(4)]
        for server in servers:
            server.start()
        while len(begun) < 4:
            over.wait(0.001)
        knock(path)
        over.set()
        for server in servers:
            server.join(20)
        assert sorted(begun) == [False, False, False, True]
        assert not path.exists()


def test_a_lock_that_somebody_keeps_holds_up_a_start_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_LOCK_EACH_S", 0.0)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with claimed(config(uds=str(tmp_path / "api.sock"))):
        knock(tmp_path / "api.sock")
    os.close(folder)


def test_a_socket_that_another_put_there_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with claimed(config(uds=str(path))):
        path.rename(tmp_path / "moved")  # else its inode number might be reused
        leave_stale(path)
    assert stat.S_ISSOCK(path.stat().st_mode)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("a file"),
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to(path.with_name("elsewhere")),
    ],
)
def test_another_kind_of_file_is_refused_and_left_alone(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "api.sock"
    make(path)
    kind = path.lstat().st_mode
    with pytest.raises(ConfigError) as caught, claimed(config(uds=str(path))):
        pass
    assert str(caught.value) == (
        f"--uds {path}: expected no file, or a socket, got another kind of file"
    )
    assert path.lstat().st_mode == kind


@pytest.mark.parametrize(
    ("name", "message"),
    [("no folder/api.sock", "No such file or directory"), ("x" * 108, "AF_UNIX path too long")],
)
def test_a_path_that_cannot_be_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught, claimed(config(uds=str(path))):
        pass
    assert str(caught.value) == f"cannot listen on --uds {path}: {message}"


@pytest.mark.parametrize("words", ["--uds a --port 8000", "--host=127.0.0.1 --uds=a"])
def test_two_addresses_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"--uds and --(port|host) exclude each other"):
        refuse_two_addresses(words.split())


def test_one_address_is_fine() -> None:
    refuse_two_addresses(["--host=::1", "--port", "1"])
    refuse_two_addresses(["--uds", "a"])
