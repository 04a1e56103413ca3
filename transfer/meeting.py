"""Where the nodes of a group meet before they have a mesh: node 0 checks their settings.

JAX's own coordinator asks for no token and compares no settings, and one node too many makes it end
a group that is serving. So it starts only once all nodes are here, at an address that only they are
told. This meeting stays open until node 0 ends, so that a late node is told that it is too late.
Nodes that met keep their streams to node 0: JAX takes 20 s to notice that a node is gone, and then
ends the others by a signal.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from model.config import ModelConfig
from model.eplb import TRIVIAL
from model.executables import digest_of_sources, settings_of_programs
from model.lora import adapters_digest, read_adapters
from model.weights import dummy_digest, model_digest
from transfer import ports, wire
from transfer.errors import BadMessage, ConfigError, Incompatible, RpcError, Unavailable
from transfer.flag_names import flag_name
from transfer.rpc import RpcClient, RpcServer, Security
from transfer.worker_config import WorkerConfig

log = logging.getLogger(__name__)

PATIENCE_S: Final = 300.0  # for all nodes to come up
_RETRY_S: Final = 0.5  # while node 0 is not there
_MORE_CONNECTIONS: Final = 64  # places for strangers, who are dropped soon
_FAREWELL_S: Final = 1.0  # for the others to leave before node 0
_LAST_WORDS_S: Final = 0.3  # for a node to log why it ends, before node 0 ends because of it
_DIGITS: Final = 16  # of a digest
# Settings that may differ between the processes of a group.
_OWN: Final = frozenset(
    (
        "registry_address",
        "host",
        "port",
        "data_host",
        "data_port",
        "worker_id",
        "node_rank",
        "dist_init_addr",
        "model_path",
        "lora_paths",  # their content is compared instead
        "served_model_name",
        "expert_distribution_file",
        "profile_dir",
        "init_expert_location",  # the file's content is compared instead
    )
)


class Meet(wire.Message, frozen=True):
    """A node other than node 0 has come, waits for the others, and stays."""

    node_rank: int
    visit: str  # drawn at random by each process, which may call again when its call broke
    settings: tuple[tuple[str, str], ...]  # that all nodes must have alike


class Met(wire.Message, frozen=True):
    """All nodes are here, or this one is refused. A second Met: node 0 leaves."""

    coordinator: str = ""  # host:port, where JAX will listen; "" = refused
    refusal: str = ""
    is_late: bool = False  # refused only because the group has met already


class Meeting:
    """Node 0's end. Used on the loop."""

    def __init__(
        self, address: str, num_nodes: int, security: Security, on_lost: Callable[[int], None]
    ) -> None:
        """address: host:port, --dist-init-addr. num_nodes: node 0 included.

        on_lost(node_rank): a node is gone after all had met.
        """
        self._address, self._num_nodes, self._on_lost = address, num_nodes, on_lost
        self._settings: Mapping[str, str] = {}
        self._came: dict[int, Meet] = {}  # by rank, of nodes whose streams are open
        self._coordinator = ""
        self._complete = asyncio.Event()
        self._over = asyncio.Event()
        self._none_left = asyncio.Event()
        # Apart from the worker's own server. Twice, since a node may come again.
        self._server = RpcServer(security, most_connections=2 * num_nodes + _MORE_CONNECTIONS)
        self._server.stream("Meet", Meet, self._meet)

    async def all_came(self, settings: Mapping[str, str], patience_s: float = PATIENCE_S) -> str:
        """Listen, and wait for all nodes. Returns where JAX is to listen, host:port.

        settings: node 0's own. Raises ConfigError when node 0 cannot listen at its address,
        Unavailable when a node does not come.
        """
        self._settings = settings
        host, port = ports.split_host_port(self._address)
        await self._server.start(host, port, "--dist-init-addr")
        try:
            async with asyncio.timeout(patience_s):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(1, self._num_nodes)) - set(self._came))
            raise Unavailable(
                f"--dist-init-addr {self._address}: nodes {missing} did not come within "
                f"{patience_s:g} s"
            ) from None
        return self._coordinator

    def let_go(self) -> None:
        """Tell all nodes that node 0 leaves. From here on, no node counts as lost."""
        self._over.set()

    async def close(self) -> None:
        """Wait for the nodes that met to leave, for at most _FAREWELL_S, then stop listening.

        They must go before this process: once JAX's coordinator is gone, a signal ends them.
        """
        self.let_go()
        if self._complete.is_set() and self._came:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), _FAREWELL_S)
        await self._server.stop(0.0)

    async def _meet(self, request: Meet) -> AsyncIterator[Met]:
        """Answer once all nodes are here, and again when node 0 leaves."""
        refused = self._refused(request)
        if refused is not None:
            log.warning("a node was refused: %s", refused.refusal)
            yield refused
            return
        rank = request.node_rank
        self._came[rank] = request
        self._none_left.clear()
        log.info("node %d came, %d of %d are here", rank, len(self._came) + 1, self._num_nodes)
        try:
            if len(self._came) == self._num_nodes - 1 and not self._complete.is_set():
                self._coordinator = _free_address(ports.split_host_port(self._address)[0])
                self._complete.set()
            await self._complete.wait()
            yield Met(self._coordinator)
            await self._over.wait()
            yield Met()
            await self._none_left.wait()  # includes this node: lasts until its stream breaks
        finally:
            if self._came.get(rank) is request:  # False if the same process called again
                self._left(rank)

    def _left(self, rank: int) -> None:
        del self._came[rank]
        if not self._came:
            self._none_left.set()
        if self._complete.is_set():
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._lose, rank)
        elif not self._over.is_set():
            log.warning("node %d left before all were here", rank)

    def _lose(self, rank: int) -> None:
        if not self._over.is_set():
            self._on_lost(rank)

    def _refused(self, request: Meet) -> Met | None:
        rank, theirs = request.node_rank, dict(request.settings)
        for name in [*self._settings, *theirs]:
            ours, other = self._settings.get(name), theirs.get(name)
            if ours != other:
                return Met(refusal=f"{name} differs: node 0 has {ours}, node {rank} has {other}")
        if not 0 < rank < self._num_nodes:
            return Met(refusal=f"--node-rank {rank}: expected 1 to {self._num_nodes - 1}")
        here = self._came.get(rank)
        if here is not None and here.visit == request.visit:
            return None
        if self._complete.is_set():
            return Met(refusal=f"node {rank} is too late: this group has met already", is_late=True)
        if here is not None:
            return Met(refusal=f"--node-rank {rank} is taken: another node came with it")
        return None


class Visit:
    """Another node's end. Used on the loop."""

    def __init__(self, address: str, node_rank: int, security: Security) -> None:
        """address: host:port, --dist-init-addr."""
        self._address, self._node_rank = address, node_rank
        self._client = RpcClient(address, security)
        self._staying: asyncio.Task[None] | None = None
        self._stream: AsyncIterator[Met]  # stays open while this process runs
        self.over = asyncio.Event()  # node 0, once met, is gone or leaves

    async def all_came(self, settings: Mapping[str, str], patience_s: float = PATIENCE_S) -> str:
        """Wait for all nodes at node 0, which may start later. Returns where JAX will listen.

        Raises ConfigError when node 0 refuses this node, Incompatible when their versions differ,
        Unauthenticated with another token, Unavailable when the group has met without this node or
        does not meet in time.
        """
        request = Meet(self._node_rank, secrets.token_hex(8), tuple(settings.items()))
        heard = ""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    self._stream = self._client.stream("Meet", request, Met)
                    try:
                        met = await anext(self._stream)
                        break
                    except Unavailable as error:
                        if not heard:
                            log.info("waiting for node 0: %s", error)
                        heard = f"; last heard: {error}"
                        # By itself gRPC asks for the address of a name ever more seldom.
                        await self._client.renew()
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise Unavailable(
                f"--dist-init-addr {self._address}: not all nodes came within {patience_s:g} s"
                f"{heard}"
            ) from None
        except BadMessage as error:
            raise Incompatible(f"node 0 has another version of kvferry: {error}") from error
        if met.refusal:
            raise (Unavailable if met.is_late else ConfigError)(met.refusal)
        self._staying = asyncio.create_task(self._stay())
        return met.coordinator

    async def close(self) -> None:
        """Leave."""
        if self._staying is not None:
            self._staying.cancel()
        await self._client.close()

    async def _stay(self) -> None:
        """Wait until node 0 is gone, or says that it leaves."""
        try:
            await anext(self._stream, None)
        except RpcError as error:
            log.info("node 0 is gone: %s", error)
        finally:
            self.over.set()


def settings_of(config: WorkerConfig, role: wire.Role) -> dict[str, str]:
    """The settings that all nodes of a group must have alike, by names that the operator knows.

    Settings that explain other differences come first. Raises ModelError for a checkpoint that
    cannot be served, ConfigError for a file that cannot be read.
    """
    # The order in which nodes make calls has no version of its own; other code may answer wrongly.
    settings = {"role": role, "version of kvferry": digest_of_sources()[:_DIGITS]}
    settings["version of messages"] = str(wire.WIRE_VERSION)
    # Programs compiled by other versions, or as other flags of XLA say, may communicate in another
    # order, and silently compute wrong answers.
    settings |= {f"version of {name}": metadata.version(name) for name in ("jax", "jaxlib")}
    settings |= {f"${name}": value for name, value in settings_of_programs().items()}
    settings["--nnodes"] = str(config.nnodes)
    flags_alike = {name: value for name, value in vars(config).items() if name not in _OWN}
    settings |= {flag_name(name): str(value) for name, value in flags_alike.items()}
    settings["--init-expert-location"] = _location(config.init_expert_location)
    digest_of = dummy_digest if config.load_format == "dummy" else model_digest
    settings["model digest"] = digest_of(config.model_path)
    settings["--lora-paths"] = _adapters(config)
    return settings


def _location(location: str) -> str:
    """--init-expert-location by content: each node may have the file at a path of its own."""
    if location == TRIVIAL:
        return location
    try:
        told = Path(location).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--init-expert-location {location} cannot be read: {error.strerror}"
        ) from error
    return f"a file with digest {hashlib.sha256(told).hexdigest()[:_DIGITS]}"


def _adapters(config: WorkerConfig) -> str:
    """--lora-paths by content, as `_location`."""
    adapters = read_adapters(config.lora_paths, ModelConfig.from_dir(config.model_path))
    names = ", ".join(adapter.name for adapter in adapters)
    return f"{names} with digest {adapters_digest(adapters)}" if adapters else "none"


def _free_address(host: str) -> str:
    """host:port where nobody listens now. JAX cannot pick a port itself and report it."""
    with ports.bind(host, 0, "--dist-init-addr") as sock:
        return ports.host_port(host, sock.getsockname()[1])
