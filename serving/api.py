"""`kvferry serve`: the HTTP process, from flags to a listening socket."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from model.config import ModelConfig
from serving.app import create_app
from serving.config import ServeConfig
from serving.dispatch import Dispatcher
from serving.metrics import Metrics
from serving.tokenizer import Tokenizer, TokenizerError
from transfer import flags
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import ConfigError
from transfer.rpc import Security

log = logging.getLogger(__name__)

HELP = {
    "model_path": "checkpoint folder; tokenizer, chat template and defaults are read from it",
    "registry_address": "host:port of the registry",
    "host": "address to listen on",
    "port": "port to listen on; 0 picks one",
    "served_model_name": "model name in the API; '' takes the folder's",
    "api_key": "key that clients must send as a bearer token; '' asks for none",
    "context_length": "most tokens of one request; 0: what the workers say",
    "max_inflight_requests": "generations in the workers' hands, each choice counts",
    "max_queued_requests": "requests waiting for one of those places; beyond it: 429",
    "queue_timeout_s": "longest wait in that queue, seconds; beyond it: 429",
    "request_timeout_s": "deadline of a request, seconds",
    "max_retries": "times a request is tried again after a worker was lost",
    "policy": "how a pair of workers is picked",
    "stream_interval": "tokens per streamed chunk, after the first",
    "batch_notify_size": "streams served before the loop may turn to others; 0: a whole step",
    "slow_client_timeout_s": "seconds a client may not read, or not send, before it is closed",
    "slow_client_buffer_bytes": "unread bytes of one stream after which that time runs",
    "sampling_defaults": "defaults of the sampling parameters: the model's or OpenAI's",
    "enable_metrics": "serve /metrics",
    "max_request_bytes": "largest request body",
}


def main(argv: Sequence[str], prog: str = "kvferry serve") -> None:
    """Run the HTTP server until it is told to stop."""
    parser = flags.Parser(prog=prog, description="serve the HTTP API")
    flags.add_flags(parser, ServeConfig, HELP)
    flags.add_security_flags(parser)
    args = parser.parse_args(argv)
    config = flags.config_from(ServeConfig, args)
    security = flags.security_from(args)
    with flags.listen(config.host, config.port, "--port") as sock:
        model_config = ModelConfig.from_dir(config.model_path)
        try:
            tokenizer = Tokenizer.from_dir(config.model_path)
        except TokenizerError as error:
            raise ConfigError(str(error)) from error
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config, security, sock, tokenizer, model_config))


async def serve(
    config: ServeConfig,
    security: Security,
    sock: socket.socket,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM; then end streams and tell the workers."""
    metrics = Metrics()
    flags.log_config(config)
    dispatcher = Dispatcher(config, security, SYSTEM_CLOCK, metrics)
    app = create_app(dispatcher, tokenizer, config, model_config)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
            backlog=4096,
        )
    )
    await dispatcher.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopped = asyncio.create_task(stop.wait())
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("HTTP server listens on %s", url)
    flags.notify_ready(url=url, model=config.model_name)
    try:
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Streams end first, each with its final frame; then sockets close.
        await dispatcher.stop()
        server.should_exit = True
        await serving
        stopped.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours stop the dispatcher first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield
