"""`kvferry serve`: the HTTP process, from flags to a listening socket."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
import uvloop
from starlette.types import ASGIApp

from model.config import ModelConfig
from model.tokenizer_reading import TokenizerError
from serving import api_parent
from serving.app import app_of, create_front
from serving.config import ServeConfig
from serving.connection import Connection
from serving.dispatch import Dispatcher
from serving.front import Front
from serving.listening import (
    BACKLOG,
    address_of,
    beside,
    bound_of,
    claimed,
    ensure_listening,
    refuse_two_addresses,
    take_no_more,
)
from serving.metrics import Metrics
from serving.otlp import OtlpSender, TraceExporter, check_endpoint
from serving.seat import Seat
from serving.siblings import Siblings
from serving.timeline import RequestTimeline
from serving.timeline_answer import timeline_of
from serving.tokenizer import Tokenizer
from transfer import flags, open_files, signals, watchdog
from transfer.bootstrap import registry_host
from transfer.clock import SYSTEM_CLOCK
from transfer.collector import calm_collector
from transfer.complaint import Tally
from transfer.errors import ConfigError
from transfer.rpc import Security, to_the_end
from transfer.signals import draining_first, on_signals

log = logging.getLogger(__name__)

_MEET_S = 2.0  # longest wait at the start for the workers that the registry lists
_ACCEPT_S = 0.1  # in which connections that have been made, or nearly, are accepted in the end
_TRACE_AFTER_S = 1.0  # workers report aborted legs, and those whose pages were late, a bit later

HELP = {
    "model_path": "checkpoint folder; tokenizer, chat template and defaults are read from it",
    "registry_address": "host:port of the registry",
    "host": "address to listen on",
    "port": "port to listen on; 0 picks one",
    "uds": "path of a Unix socket to listen on instead of host and port, for a proxy on this host",
    "api_workers": "number of HTTP processes behind the one address; they divide "
    "--max-inflight-requests and --max-queued-requests among them",
    "served_model_name": "model name in the API; '': the folder's name",
    "chat_template": "file with a Jinja chat template; '': the checkpoint's",
    "default_chat_template_kwargs": "variables that chats give to the template unless they set "
    """them themselves, as a JSON object: '{"enable_thinking": false}'; '': none""",
    "api_key": "key that clients must send as a bearer token; '': none is asked for; default: "
    "$KVFERRY_API_KEY, which keeps the key out of process lists",
    "allowed_origins": "web origins whose scripts may use the API, as a JSON list: "
    """'["https://example.com"]', or '["*"]' for all; default: none""",
    "context_length": "maximum tokens of a request, prompt and output; 0: as the workers say",
    "max_inflight_requests": "maximum number of generations handed to workers at once; each choice "
    "of a request counts",
    "max_queued_requests": "maximum number of generations waiting for such a place; beyond it "
    "clients get 429",
    "queue_timeout_s": "maximum seconds a generation waits in that queue before its client gets "
    "429",
    "request_timeout_s": "deadline of a request, in seconds",
    "drain_timeout_s": "seconds in which requests that have arrived may finish after SIGTERM; with "
    "`up` also the time that a worker has after POST /drain",
    "max_retries": "how often a request is tried again after it lost a worker",
    "policy": "how a pair of workers is picked",
    "prefill_policy": "how the prefill worker is picked; same: as --policy says",
    "decode_policy": "how the decode worker is picked; same: as --policy says",
    "breaker_failures": "failures in a row after which a worker is passed over for a while",
    "progress_timeout_s": "seconds without progress of its loop after which a worker is passed "
    "over and /health fails; must be longer than a chunk or a step takes",
    "watchdog_timeout_s": watchdog.HELP,
    "stream_interval": "tokens per streamed chunk after the first; auto: 1, more while the server "
    "falls behind",
    "batch_notify_size": "streams that get a step's tokens before the event loop turns to other "
    "work; 0: all of them",
    "timeout_keep_alive_s": "seconds after which an idle connection is closed; must be longer than "
    "clients keep theirs, or a request may meet a connection that is being closed",
    "slow_client_timeout_s": "seconds after which a client that does not read its answer, or does "
    "not send its request, is disconnected",
    "slow_client_buffer_bytes": "unread bytes of a stream at which --slow-client-timeout starts to "
    "run",
    "sampling_defaults": "defaults of the sampling parameters: the model's or OpenAI's",
    "reasoning_parser": "format of the model's reasoning, which chats then return in a field of "
    "its own; none: it stays in the text",
    "reasoning_field": "name of that field",
    "tool_call_parser": "format of the model's tool calls, which chats then return in fields of "
    "their own; none: they stay in the text",
    "enable_metrics": "serve /metrics",
    "enable_tokenizer_info_endpoint": "serve /tokenizer_info: tokenizer_config.json, with the chat "
    "template",
    "otlp_traces_endpoint": "URL to which spans of ended requests are sent (OTLP over HTTP), for "
    "example http://HOST:4318/v1/traces; needs the extra otel; '': none are sent",
    "timeline_requests": "number of latest requests, counting each choice, that each process keeps "
    "for /requests/ID/timeline; 0: none",
    "max_request_bytes": "maximum bytes of a request body",
}


def main(argv: Sequence[str], prog: str = "kvferry serve") -> None:
    """Run the HTTP server until it is told to stop; with --api-workers, the parent of several."""
    parser = flags.Parser(prog=prog, description="start the HTTP API")
    flags.add_flags(parser, ServeConfig, HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    refuse_two_addresses(argv)
    config = flags.config_from(ServeConfig, args)
    registry_host(config.registry_address)  # a malformed one fails now; unreachable, it is retried
    security = flags.security_from(args)
    check_endpoint(config.otlp_traces_endpoint)
    seat = Seat.from_environment()
    if config.api_workers > 1 and seat is None:
        api_parent.run(config, security)
        return
    signals.exit_on_signals()  # so that the file of a Unix socket goes even while the model loads
    with claimed(config) if seat is None else _seated(config, seat) as sock:
        model_config = ModelConfig.from_dir(config.model_path)
        try:
            tokenizer = Tokenizer.from_dir(config.model_path, config.chat_template)
        except TokenizerError as error:
            raise ConfigError(str(error)) from error
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            serving = serve(config, security, sock, tokenizer, model_config, seat)
            runner.run(to_the_end(serving))


def _seated(config: ServeConfig, seat: Seat) -> socket.socket:
    """The socket of one of several processes: its own on their port, or their one Unix socket."""
    if config.uds:
        return socket.socket(fileno=seat.listen_fd)
    return beside(config)


async def serve(
    config: ServeConfig,
    security: Security,
    sock: socket.socket,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    seat: Seat | None,
) -> None:
    """Serve on a bound socket until told to leave; then end streams and tell the workers.

    SIGTERM drains. SIGINT, a second SIGTERM, or a SIGTERM before the server takes clients ends at
    once. seat: this process's place among several, None when it serves alone. Raises ConfigError
    when another process has taken the port meanwhile. As soon as the registry is reached, raises
    Unauthenticated when it refuses the token, and Incompatible when it is none of this version.
    """
    own = config if seat is None else seat.share_of(config)
    flags.log_config(own)
    dispatcher = Dispatcher(own, security, SYSTEM_CLOCK)
    front = create_front(dispatcher, tokenizer, config, model_config)
    siblings = Siblings(front, seat, security)
    exporter = None
    if config.otlp_traces_endpoint:
        sender = OtlpSender(config.otlp_traces_endpoint)
        exporter = TraceExporter(sender, dispatcher.metrics.traces_dropped)
        dispatcher.timelines.on_over = trace_later(exporter, front)
    server = _Server(http_config(app_of(front, siblings), own, dispatcher.metrics))
    await siblings.start()
    watching = await dispatcher.start()
    calm_collector()

    async def take_clients() -> None:
        # A restarted process gets requests at once, and needs workers to serve them.
        await dispatcher.meet(_MEET_S)
        # Listen only now: the kernel hands each listening process its share of the connections.
        ensure_listening(sock, config)
        await server.serve(sockets=[sock])

    leaving = front.leaving
    told = draining_first(
        front.drain, leaving.over.set, server.takes.is_set, lambda: leaving.draining
    )
    with on_signals(told):
        serving = asyncio.create_task(take_clients())
        stopped = asyncio.create_task(leaving.over.wait())
        takes = asyncio.create_task(server.takes.wait())
        hanging = asyncio.create_task(watchdog.watch(config.watchdog_timeout_s))
        try:
            ends = {serving, stopped, watching}
            await asyncio.wait({*ends, takes}, return_when=asyncio.FIRST_COMPLETED)
            if takes.done():
                address = address_of(sock)
                log.info("HTTP server listens on %s", address)
                flags.notify_ready(url=address.url, uds=address.uds, model=config.model_name)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching  # raises why
        finally:
            # Streams end first, each with its final frame; then sockets close.
            await dispatcher.stop()
            server.should_exit = True
            await serving
            await siblings.stop()
            front.model.trial.close()
            stopped.cancel()
            takes.cancel()
            hanging.cancel()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)


def http_config(app: ASGIApp, config: ServeConfig, metrics: Metrics) -> uvicorn.Config:
    """How uvicorn serves connections. metrics: counts the connections that are too many."""
    files = open_files.limit()
    what = f"%d connection(s) too many for a process that may open {files} files: got 503 or closed"
    surplus = Tally(log, what)

    def on_surplus(peer: str) -> None:
        metrics.connection_rejected()
        surplus.tell(peer)

    bound = bound_of(config, on_surplus)
    return uvicorn.Config(
        app,
        http=Connection.lingering(config.slow_client_timeout_s, bound),
        loop="uvloop",
        lifespan="off",
        log_config=None,  # uvicorn's lines are to look like ours
        log_level=max(logging.WARNING, logging.getLogger().getEffectiveLevel()),
        access_log=False,
        timeout_keep_alive=config.timeout_keep_alive_s,  # type: ignore[arg-type]  # a timer's
        timeout_graceful_shutdown=2,
        backlog=BACKLOG,
    )


def trace_later(exporter: TraceExporter, front: Front) -> Callable[[RequestTimeline], None]:
    """The callback for ended requests: it traces each once its workers have reported."""
    policies = front.dispatcher.timelines.policies

    def trace(request: RequestTimeline) -> None:
        front.timers.call_later(
            _TRACE_AFTER_S, lambda: exporter.offer(timeline_of(request, policies))
        )

    return trace


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours stop the dispatcher first.

    takes: set once the server takes connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.takes = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then set `takes`."""
        await super().startup(sockets)
        self.takes.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept what has connected before the listener closes, which would reset it."""
        for sock in sockets or []:
            take_no_more(sock)
        await asyncio.sleep(_ACCEPT_S)
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)  # what was accepted last becomes one of the connections
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield
