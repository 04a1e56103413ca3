"""The API process's configuration: one frozen value, validated once, printed at start."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serving.chat_template import RESERVED_KWARGS
from serving.parsing import ReasoningParser, ToolCallParser
from transfer import watchdog
from transfer.checks import above_zero, at_least, check_port, has_an_end
from transfer.errors import ConfigError

Policy = Literal["least_load", "round_robin", "random", "power_of_two", "cache_aware"]
# In lower case, with nothing after the port. null: the origin of files and sandboxed pages.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^A-Z/?#@\s]+")
RolePolicy = Literal["same", Policy]  # same: as --policy


@dataclass(frozen=True)
class ServeConfig:
    """Configuration of `kvferry serve`. Names are those of the flags."""

    model_path: Path  # tokenizer, chat template and generation defaults; no weights are read
    registry_address: str  # host:port of the control server of the registry
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""  # path of a Unix socket to listen on instead
    api_workers: int = 1  # HTTP processes behind the one address
    served_model_name: str = ""  # default: the folder's name
    chat_template: str = ""  # file of one; default: the checkpoint's own
    default_chat_template_kwargs: str = ""  # JSON: variables of the template
    api_key: str = ""  # "" = no key asked
    allowed_origins: tuple[str, ...] = ()  # of pages whose scripts may read answers (CORS)
    context_length: int = 0  # 0 = what the workers say
    max_inflight_requests: int = 256  # generations in the workers' hands, each choice counts
    max_queued_requests: int = 1024  # waiting for one of those
    queue_timeout_s: float = 30.0  # longest wait in that queue before 429
    request_timeout_s: float = 600.0  # deadline of one request, travels with it
    drain_timeout_s: float = 30.0  # longest wait for what has come when told to leave
    max_retries: int = 3
    policy: Policy = "least_load"
    prefill_policy: RolePolicy = "same"
    decode_policy: RolePolicy = "same"
    breaker_failures: int = 5  # of a worker, in a row, before it is passed over for a while
    progress_timeout_s: float = 10.0  # a worker whose loop stands still for so long is, too
    watchdog_timeout_s: float = watchdog.TIMEOUT_S
    stream_interval: int | Literal["auto"] = "auto"  # tokens a chunk after the first
    batch_notify_size: int = 0  # streams served before the loop may turn; 0 = all of a step
    # httpx keeps idle connections for 5 s, as uvicorn does by default, and a request that meets a
    # closing connection is lost. This is longer than Google's load balancers (600 s), Go (90 s),
    # nginx, AWS's load balancers and .NET (60 s) keep them, so those close first.
    timeout_keep_alive_s: float = 620.0
    slow_client_timeout_s: float = 30.0
    slow_client_buffer_bytes: int = 1 << 20  # a stream's unread bytes before its timer starts
    sampling_defaults: Literal["model", "openai"] = "model"
    reasoning_parser: ReasoningParser = "none"
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"  # of chats
    tool_call_parser: ToolCallParser = "none"
    enable_metrics: bool = True
    enable_tokenizer_info_endpoint: bool = False  # chat template and all
    otlp_traces_endpoint: str = ""  # URL that takes OTLP over HTTP; "" = no traces
    timeline_requests: int = 512  # of which /requests/ID/timeline tells; each choice counts
    max_request_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name in (
            "max_inflight_requests",
            "breaker_failures",
            "max_request_bytes",
            "slow_client_buffer_bytes",
        ):
            at_least(self, name, 1)
        if self.stream_interval != "auto" and self.stream_interval < 1:
            raise ConfigError(
                f"--stream-interval must be auto or at least 1, got {self.stream_interval}"
            )
        for name in (
            "max_queued_requests",
            "drain_timeout_s",
            "max_retries",
            "batch_notify_size",
            "context_length",
            "timeline_requests",
        ):
            at_least(self, name, 0)
        for name in (
            "queue_timeout_s",
            "request_timeout_s",
            "progress_timeout_s",
            "timeout_keep_alive_s",
            "slow_client_timeout_s",
        ):
            above_zero(self, name)
        watchdog.check(self)
        if (self.reasoning_parser == "gpt-oss") != (self.tool_call_parser == "gpt-oss"):
            raise ConfigError(
                "gpt-oss is one format for reasoning and tool calls: give it to both "
                f"--reasoning-parser and --tool-call-parser, got {self.reasoning_parser} and "
                f"{self.tool_call_parser}"
            )
        if self.otlp_traces_endpoint and not self.timeline_requests:
            raise ConfigError("--otlp-traces-endpoint needs --timeline-requests above 0, got 0")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):  # it would be equal to none that a browser sends
                raise ConfigError(
                    "--allowed-origins: expected * or origins as browsers send them, such as "
                    f"https://example.com or http://localhost:3000, got {origin!r}"
                )
        if self.api_key != self.api_key.strip() or not self.api_key.isprintable():
            raise ConfigError(
                "--api-key, or $KVFERRY_API_KEY, must not have control characters, nor blanks or "
                "line ends around it: no client could send it"
            )
        if self.chat_template:
            has_an_end("--chat-template", Path(self.chat_template))
        self._check_template_kwargs()
        if not self.host:
            raise ConfigError("--host must not be empty; 0.0.0.0 stands for every address")
        check_port(self, "port")
        if not 1 <= self.api_workers <= self.max_inflight_requests:
            raise ConfigError(
                "--api-workers must be 1 to --max-inflight-requests, which they share "
                f"({self.max_inflight_requests}), got {self.api_workers}"
            )

    def _check_template_kwargs(self) -> None:
        flag = "--default-chat-template-kwargs"
        try:
            kwargs = self.template_kwargs
        except ValueError:
            kwargs = None
        if not isinstance(kwargs, dict):
            example = '{"enable_thinking": false}'
            got = self.default_chat_template_kwargs
            raise ConfigError(f"{flag}: expected a JSON object, such as '{example}', got {got!r}")
        if wrong := RESERVED_KWARGS & kwargs.keys():
            raise ConfigError(f"{flag}: must not set {', '.join(sorted(wrong))}")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables that every chat gives to the template, unless it sets them itself."""
        return json.loads(self.default_chat_template_kwargs or "{}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path.resolve().name
