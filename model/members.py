"""Several processes with one mesh: how JAX brings them together, and what they tell each other.

JAX runs every program on all devices of a mesh, so each of its processes, a *member*, dispatches
the same programs in the same order. Member 0 leads: transfer/group.py tells the others what to
call. Before they get here, transfer/meeting.py has seen all of them.
"""

import ipaddress
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import jax
import numpy as np
from jax.experimental import multihost_utils

from model.errors import ModelError, NodeLost
from model.threads import in_daemon_thread

_JOIN_S: Final = 60  # all members are there by now
_HEARTBEAT_S: Final = 20  # of JAX's own service, which is slower than the leader's calls


def join(coordinator: str, num_members: int, member: int, crosses_hosts: bool = False) -> None:
    """Make one system of all members' devices. Call once, before the first array.

    coordinator: host:port, the only address where member 0 has JAX listen. All members call this at
    about the same time. crosses_hosts: whether some may be on other hosts. Raises NodeLost when
    another member does not, ModelError when members have different numbers of devices or cannot
    reach each other.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_check_proxy_envs", False)  # none is used: prepare_devices
    meeting = in_daemon_thread(partial(_meet, coordinator, num_members, member), "join")
    apart = f"{num_members} nodes did not come together"
    try:
        # When JAX's own timeout expires, it ends the process without a word: ours is shorter.
        meeting.result(_JOIN_S)
    except TimeoutError as error:
        raise NodeLost(f"{apart}: not all of them joined within {_JOIN_S} s") from error
    except (RuntimeError, ValueError) as error:
        raise NodeLost(f"{apart}: {error}") from error
    try:
        owners = [device.process_index for device in jax.devices()]
    except (RuntimeError, AssertionError) as error:  # also when there are none here
        raise NodeLost(f"the devices of {num_members} nodes are not found: {error}") from error
    counts = [owners.count(node) for node in range(num_members)]
    if len(set(counts)) > 1:
        told = ", ".join(map(str, counts))
        raise ModelError(f"devices of the nodes: {told}; every node must have the same number")
    if crosses_hosts and jax.default_backend() == "cpu":
        _check_own_name()
    # Their devices connect now: at the first exchange gloo waits 30 s for the others, and it would
    # follow the loading of weights, which may differ by minutes.
    texts_of_all("connected")


def _check_own_name() -> None:
    """Raises ModelError where gloo would listen at an address that other hosts cannot reach.

    gloo listens at the first address of the host's name, and JAX lets nobody choose another.
    """
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return  # gloo says what it then cannot do
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ModelError(
            f"the name of this host, {name}, stands for {address}, where processors of other hosts "
            "cannot reach those of this one: give it an address of the network in /etc/hosts"
        )


def _meet(coordinator: str, num_members: int, member: int) -> None:
    jax.distributed.initialize(
        coordinator,
        num_members,
        member,
        cluster_detection_method="deactivate",
        initialization_timeout=2 * _JOIN_S,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        coordinator_bind_address=coordinator,  # by default it would listen on all addresses
    )


def is_leader() -> bool:
    """Whether this process speaks for its group; a lone process does."""
    return jax.process_index() == 0


def texts_of_all(text: str) -> list[str]:
    """Each member's text, the leader's first. All members must call it; they wait for each other.

    Raises NodeLost when one is gone.
    """
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    try:
        own_size = np.array([len(data)], np.int32)
        sizes = multihost_utils.process_allgather(own_size).ravel().tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(data)] = data
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    except (RuntimeError, ValueError) as error:
        raise NodeLost(f"another node is lost, see its last lines: {error}") from error
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def least_of_all(number: int) -> int:
    """The smallest that any member gave."""
    return min(map(int, texts_of_all(str(number))))


def any_of_all(is_so: bool) -> bool:
    """Whether it is true in any member."""
    return "1" in texts_of_all(str(int(is_so)))


def first_devices(num_devices: int) -> Sequence[jax.Device]:
    """The first devices of this machine; with several members equally many of each, in order."""
    each = num_devices // jax.process_count()
    taken: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        taken.setdefault(device.process_index, []).append(device)
    return [device for _, own in sorted(taken.items()) for device in own[:each]]
