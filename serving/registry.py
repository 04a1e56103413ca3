"""`kvferry registry`: the process that lists the live workers and knows which rank has a room."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from transfer import flags, watchdog
from transfer.bootstrap import RegistryServer
from transfer.certificates import check_shown
from transfer.checks import above_zero, at_least, check_port
from transfer.clock import SYSTEM_CLOCK
from transfer.collector import calm_collector
from transfer.errors import ConfigError
from transfer.ports import host_port
from transfer.routes import MAX_ROOMS, TTL_S, RouteTable
from transfer.rpc import Security, to_the_end
from transfer.signals import on_signals
from transfer.worker import HEARTBEAT_S

log = logging.getLogger(__name__)

DEFAULT_PORT = 8998


@dataclass(frozen=True)
class RegistryConfig:
    """Configuration of `kvferry registry`. Names are those of the flags."""

    host: str = "127.0.0.1"
    disaggregation_bootstrap_port: int = DEFAULT_PORT
    routes_port: int = 0
    lease_ttl_s: float = 3.0
    route_ttl_s: float = TTL_S
    max_routes: int = MAX_ROOMS
    watchdog_timeout_s: float = watchdog.TIMEOUT_S

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("--host must not be empty; 0.0.0.0 stands for every address")
        check_port(self, "routes_port")
        if self.lease_ttl_s < 2 * HEARTBEAT_S:
            raise ConfigError(
                f"--lease-ttl must be at least {2 * HEARTBEAT_S:g}, since workers send a heartbeat "
                f"every {HEARTBEAT_S:g} s, got {self.lease_ttl_s}"
            )
        above_zero(self, "route_ttl_s")
        at_least(self, "max_routes", 1)
        check_port(self, "disaggregation_bootstrap_port")
        watchdog.check(self)


HELP = {
    "host": "address to listen on",
    "disaggregation_bootstrap_port": "port to listen on; 0 picks one",
    "routes_port": "port on which prefill workers report, and decode workers follow, the "
    "data-parallel ranks of rooms; 0 picks one",
    "lease_ttl_s": "seconds after its last heartbeat for which a worker counts as alive",
    "route_ttl_s": "seconds after which the data-parallel rank of a room that nobody ends is "
    "dropped",
    "max_routes": "maximum number of rooms whose data-parallel ranks are kept; the oldest are "
    "dropped first",
    "watchdog_timeout_s": watchdog.HELP,
}


def main(argv: Sequence[str], prog: str = "kvferry registry") -> None:
    """Run the registry until it is told to stop."""
    parser = flags.Parser(prog=prog, description="start the registry, which knows the live workers")
    flags.add_flags(parser, RegistryConfig, HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    security = flags.security_from(args)
    if security.cert_file is not None and security.key_file is not None:
        check_shown(security.cert_file, security.key_file)  # peers may reach us by any name
    serving = serve(flags.config_from(RegistryConfig, args), security)
    uvloop.run(to_the_end(serving))


async def serve(config: RegistryConfig, security: Security) -> None:
    """Listen, report that it is ready, and wait for SIGINT or SIGTERM."""
    flags.log_config(config)
    stop = asyncio.Event()
    routes = RouteTable(config.max_routes, config.route_ttl_s)
    server = RegistryServer(security, SYSTEM_CLOCK, config.lease_ttl_s, routes)
    ports = (config.disaggregation_bootstrap_port, config.routes_port)
    with on_signals({signal.SIGINT: stop.set, signal.SIGTERM: stop.set}):
        address = host_port(config.host, await server.start(config.host, *ports))
        log.info("registry is ready on %s", address)
        calm_collector()
        flags.notify_ready(address=address)
        watching = asyncio.create_task(watchdog.watch(config.watchdog_timeout_s))
        await stop.wait()
        await server.stop()
        watching.cancel()
