"""The system under faults: its processes, what they say about each other, and their restarts."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from bench.endings import lifeline
from serving.demo import demo_model_path
from tests.faults.member import Line, Member
from tests.faults.network import Loopback, Network
from tests.faults.proxy import Proxy
from tests.ports import free_port

CONTEXT = 512
START_TIMEOUT_S = 240.0
# Small pools and chunks: prompts of several chunks, and requests that preempt each other.
SIZES = {
    "prefill": (
        "--chunked-prefill-size=32",
        "--max-seqs-per-chunk=4",
        "--transfer-connections=2",
    ),
    "decode": (
        "--max-running-requests=4",
        "--max-total-tokens=640",
        "--speculative-algorithm=NGRAM",
    ),
}
# For workers that start often, on however many cores there are.
FEW_PROGRAMS = {
    "prefill": ("--chunked-prefill-size=32", "--max-seqs-per-chunk=1"),
    "decode": ("--max-running-requests=4", "--max-total-tokens=1024"),
}
REQUEST_TIMEOUT_S = 120.0
GROUPS_AWAY_S = 90.0
_OPEN = re.compile(r"worker (\S+) is open")
_BROKE = re.compile(r"worker (\S+) (?:broke off|has drained)")


class System:
    """Registry, workers and API processes, each a process that may end at any time.

    A process that ends is started again, as an operator's supervisor would do.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "tcp",
        network: Network | None = None,
        workers: int = 2,
        prefills: int = 0,
        apis: int = 2,
        model: Path | None = None,
        sizes: Mapping[str, tuple[str, ...]] = SIZES,
        nodes: Mapping[str, int] | None = None,
        few_steps: bool = False,
        on_line: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """workers: of each role. prefills: if more than workers. model: default the demo model.

        sizes: flags of each role. nodes: of how many processes a worker of a role consists; they
        then have as many devices (`--tp-size`), unless `sizes` says otherwise.
        few_steps: see tests/compiling.py.

        on_line: called on the event loop.
        """
        self._sizes = sizes
        self._few_steps = few_steps
        self._nodes = dict.fromkeys(SIZES, 1) | dict(nodes or {})
        self._model = model or demo_model_path()
        self.folder = folder
        self.members: dict[str, Member] = {}
        self._lifeline = contextlib.ExitStack()
        self._lifeline_fd = self._lifeline.enter_context(lifeline())
        self.proxies: dict[str, Proxy] = {}
        self.network = network or Loopback()
        self.open: dict[str, set[str]] = {}  # api -> workers whose streams it has open
        self.unexpected: list[str] = []  # how processes ended that were not told to
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._keeper: asyncio.Task[None] | None = None
        self._proxy_ports: dict[str, int] = {}
        self._registry = f"{self.network.host_of('registry')}:{free_port()}"
        self._backend = backend
        port = self._registry.rpartition(":")[2]
        self._add("registry", "registry", ["registry", f"--disaggregation-bootstrap-port={port}"])
        for number in range(max(workers, prefills)):
            self._add_worker("prefill", number)
            if number < workers:
                self._add_worker("decode", number)
        for number in range(apis):
            self._add_api(number)

    def named(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def workers(self) -> list[Member]:
        """Every worker's leader."""
        return [m for role in SIZES for m in self.named(role) if m.leader is m]

    def uds(self, api: str) -> Path:
        return self.folder / f"{api}.sock"

    async def start(self) -> None:
        """Start everything, and wait until every API process sees every worker."""
        await self.network.open([member.name for member in self.members.values()])
        for proxy in self.proxies.values():
            await proxy.start(self._proxy_ports[proxy.decode])
        for member in self.members.values():
            member.start()
        self._keeper = asyncio.create_task(self._keep())
        await self.whole()

    async def whole(self) -> None:
        """Wait until all processes are up, and every API process sees every worker."""
        workers = {member.name for member in self.workers()}

        def is_whole() -> bool:
            return all(m.up for m in self.members.values()) and all(
                self.open[api.name] == workers for api in self.named("api")
            )

        await until(
            is_whole,
            START_TIMEOUT_S,
            lambda: f"not whole: {self.describe()}; {self.unexpected}\n{self.logs()}",
        )

    def describe(self) -> str:
        """Each process's state, in one line."""
        states = []
        for name, member in self.members.items():
            state = "frozen" if member.frozen else "up" if member.up else "starting"
            sees = f" sees {sorted(self.open[name])}" if member.role == "api" else ""
            states.append(f"{name} {state if member.alive else 'dead'}{sees}")
        return "; ".join(states)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for member in self.members.values():
            await asyncio.to_thread(member.close)
        for proxy in self.proxies.values():
            await proxy.close()
        await self.network.close()
        self._lifeline.close()

    # --- its state --------------------------------------------------------------------------------

    async def info(self, api: str) -> dict[str, Any]:
        """What /get_server_info of this API process says."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.uds(api)))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=30
        ) as http:
            reply = await http.get("/get_server_info")
            reply.raise_for_status()
            info: dict[str, Any] = reply.json()
            return info

    async def flush(self, api: str) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(self.uds(api)))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=30
        ) as http:
            (await http.post("/flush_cache")).raise_for_status()

    def logs(self, lines: int = 30) -> str:
        """The last lines of each process."""
        parts = []
        for name, member in self.members.items():
            parts.append(f"--- {name}, life {member.life}, exit code {member.exit_code()}")
            parts += [line.text for line in list(member.lines)[-lines:]]
        return "\n".join(parts)

    # --- processes --------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Restart every process that ended."""
        while True:
            for member in self.members.values():
                if member.alive:
                    continue
                self.unexpected += member.odd_end()
                if member.role == "api":
                    self.open[member.name] = set()
                member.start()
            await asyncio.sleep(0.05)

    def _add(self, name: str, role: str, words: list[str], leader: Member | None = None) -> None:
        host = self.network.host_of(name)
        words = [*words, *([] if role == "api" else [f"--host={host}"])]
        inside = self.network.inside(name)
        command = ["serving.launch", *words]
        if name in self.proxies:
            command = ["tests.faults.behind_proxy", self._proxy_address(name), *words]
        told = self._hear, self._lifeline_fd, inside, leader, self._few_steps
        self.members[name] = Member(name, role, command, *told)

    def _add_worker(self, role: str, number: int) -> None:
        """Add all nodes of a worker: `decode-0`, which leads, and `decode-0.1` to be led by it."""
        worker, nnodes, meeting = f"{role}-{number}", self._nodes[role], free_port()
        for rank in range(nnodes):
            words = []
            if nnodes > 1:
                words = [
                    f"--nnodes={nnodes}",
                    f"--node-rank={rank}",
                    f"--dist-init-addr={self.network.host_of(worker)}:{meeting}",
                    f"--tp-size={nnodes}",
                ]
            name = f"{worker}.{rank}" if rank else worker
            self._add_node(role, name, [f"--worker-id={worker}", *words], self.members.get(worker))

    def _add_node(self, role: str, name: str, words: list[str], leader: Member | None) -> None:
        words = [
            role,
            f"--model-path={self._model}",
            f"--registry-address={self._registry}",
            f"--port={free_port()}",
            f"--context-length={CONTEXT}",
            "--page-size=16",
            f"--disaggregation-transfer-backend={self._backend}",
            *words,
            *self._sizes[role],
        ]
        if role == "prefill":
            words.append("--max-frame-bytes=65536")
        if role == "decode":
            port = free_port()
            words.append(f"--data-port={port}")
            if self._backend == "tcp" and isinstance(self.network, Loopback):
                self.proxies[name] = Proxy(name, port)
        self._add(name, role, words, leader)

    def _add_api(self, number: int) -> None:
        name = f"api-{number}"
        self.open[name] = set()
        words = [
            "serve",
            f"--model-path={self._model}",
            f"--registry-address={self._registry}",
            f"--uds={self.uds(name)}",
            f"--request-timeout={REQUEST_TIMEOUT_S}",
            "--served-model-name=demo_model",
        ]
        if max(self._nodes.values()) > 1:  # which on a busy host may all be away for long
            words.append(f"--queue-timeout={GROUPS_AWAY_S}")
        self._add(name, "api", words)

    def _proxy_address(self, name: str) -> str:
        port = self._proxy_ports.setdefault(name, free_port())
        return f"tcp://127.0.0.1:{port}"

    # --- what they say ----------------------------------------------------------------------------

    def _hear(self, line: Line) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._heard, line)

    def _heard(self, line: Line) -> None:
        member = self.members[line.member]
        if member.role == "api" and line.life == member.life:
            if found := _OPEN.search(line.text):
                self.open[line.member].add(found[1])
            elif found := _BROKE.search(line.text):
                self.open[line.member].discard(found[1])
        self._on_line(line)


async def until(true: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> None:
    """Poll until the condition, which depends on other processes, holds."""
    try:
        async with asyncio.timeout(timeout_s):
            while not true():  # noqa: ASYNC110  (other processes' state)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"after {timeout_s:g} s: {why()}") from None
