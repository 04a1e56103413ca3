"""The configuration that prefill and decode workers share, and its validation."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from model.eplb import TRIVIAL, ExpertPolicy
from transfer import nixl_agent
from transfer.checks import (
    above_zero,
    at_least,
    at_most,
    check_port,
    is_there,
    reachable,
)
from transfer.errors import ConfigError
from transfer.flag_names import flag_name
from transfer.ports import split_host_port

MAX_DEVICES = 1024  # as many virtual devices as a CPU can still make
MAX_THREADS = 4096
MAX_TIMEOUT_S = 1_000_000  # what poll and timers of threads can wait for, rounded down
ANY_PROMPT = -1  # of decode's --local-prefill-tokens
PLACING = tuple(field.name for field in fields(ExpertPolicy))


@dataclass(frozen=True)
class WorkerConfig:
    """Flags that prefill and decode share. Names are those of the flags."""

    model_path: Path
    registry_address: str  # host:port of the registry's control server
    host: str = "127.0.0.1"
    port: int = 0  # control server; 0 picks one
    worker_id: str = ""  # default: role, host and port
    served_model_name: str = ""  # default: the folder's name
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, none are read
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    context_length: int = 0  # 0 = the model's, at most 4096 on CPU
    cpu_threads: int = 0  # of XLA on CPU; 0 = one for a small network, else all available
    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    nnodes: int = 1  # processes that share the mesh
    node_rank: int = 0  # 0 leads
    dist_init_addr: str = ""  # host:port where node 0 waits for the others
    ep_num_redundant_experts: int = 0  # physical experts of a layer beyond the logical ones
    init_expert_location: str = TRIVIAL  # or a JSON file
    enable_eplb: bool = False
    expert_distribution_file: str = ""  # gets the rows that chose each expert at the last count
    eplb_rebalance_num_iterations: int = 1000  # calls to the device that count rows
    eplb_rebalance_layers_per_chunk: int = 1  # layers moved between two calls; 0 = all
    eplb_min_rebalancing_utilization_threshold: float = 1.0
    page_size: int = 0  # tokens; 0 = 16 on CPU, 64 elsewhere
    max_total_tokens: int = 0  # page pool in tokens; 0 = what memory allows
    mem_fraction_static: float = 0.0  # of device memory, on CPU of free memory; 0 = as fits
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8_e4m3"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"  # of layers' weights in memory
    # Tokens of a chunk; 0 = 512 on CPU, elsewhere 8192, or 2048 where decode's streams wait for it.
    chunked_prefill_size: int = 0
    disable_radix_cache: bool = False
    max_queued_requests: int = 1024
    disaggregation_transfer_backend: Literal["auto", "nixl", "shm", "tcp"] = "auto"
    drain_timeout_s: float = 30.0  # the most time for begun rooms to finish, once told to leave
    stall_timeout_s: float = 3.0  # a data connection that moves nothing for so long is lost
    watchdog_timeout_s: float = 300.0  # a process that stands still for so long ends; 0 = none does

    def __post_init__(self) -> None:
        for name in ("tp_size", "ep_size", "dp_size", "max_queued_requests"):
            at_least(self, name, 1)
        for name in ("context_length", "page_size", "max_total_tokens", "chunked_prefill_size"):
            at_least(self, name, 0)
        at_least(self, "cpu_threads", 0)
        at_most(self, "cpu_threads", MAX_THREADS)
        check_devices(self.tp_size, self.dp_size)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"--page-size must be a power of two, got {self.page_size}")
        if not self.host:
            raise ConfigError("--host must not be empty: peers reach this worker by it")
        reachable(self, "host")
        check_experts(self.ep_size, self.tp_size, self.dp_size)
        self._check_placing()
        self._check_nodes()
        above_zero(self, "stall_timeout_s")
        at_most(self, "stall_timeout_s", MAX_TIMEOUT_S)
        at_least(self, "drain_timeout_s", 0)
        at_least(self, "watchdog_timeout_s", 0)
        at_most(self, "watchdog_timeout_s", MAX_TIMEOUT_S)
        if not 0.0 <= self.mem_fraction_static <= 1.0:
            raise ConfigError(
                f"--mem-fraction-static must be in [0, 1], got {self.mem_fraction_static}"
            )
        check_port(self, "port")
        if self.disaggregation_transfer_backend == "nixl":
            nixl_agent.find()

    def _check_placing(self) -> None:
        """Raises ConfigError for a placement of experts that makes no sense."""
        at_least(self, "ep_num_redundant_experts", 0)
        at_least(self, "eplb_rebalance_num_iterations", 1)
        at_least(self, "eplb_rebalance_layers_per_chunk", 0)
        threshold = self.eplb_min_rebalancing_utilization_threshold
        if not 0.0 < threshold <= 1.0:
            raise ConfigError(
                "--eplb-min-rebalancing-utilization-threshold must be above 0 and at most 1, got "
                f"{threshold}"
            )
        if self.expert_distribution_file:
            if not self.enable_eplb:
                raise ConfigError("--expert-distribution-file needs --enable-eplb to count rows")
            folder = Path(self.expert_distribution_file).absolute().parent
            if not is_there("--expert-distribution-file", folder, folder.is_dir):
                raise ConfigError(f"--expert-distribution-file: {folder} is not a folder")
        if self.ep_size == 1:
            usual = WorkerConfig.__dataclass_fields__
            for name in ("ep_num_redundant_experts", "init_expert_location", "enable_eplb"):
                if getattr(self, name) != usual[name].default:
                    raise ConfigError(f"{flag_name(name)} needs --ep-size above 1, got 1")

    def _check_nodes(self) -> None:
        """Raises ConfigError unless the nodes share the devices evenly and can meet."""
        at_least(self, "nnodes", 1)
        at_least(self, "node_rank", 0)
        at_most(self, "node_rank", self.nnodes - 1)
        num_devices = self.dp_size * self.tp_size
        if num_devices % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} must divide --dp-size {self.dp_size} x --tp-size "
                f"{self.tp_size}: all nodes have the same number of devices"
            )
        if self.nnodes > 1:
            try:
                split_host_port(self.dist_init_addr)
            except ValueError as error:
                raise ConfigError(
                    f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT, or [HOST]:PORT for "
                    f"IPv6, where node 0 waits for the others; got {self.dist_init_addr!r}"
                ) from error
            if self.enable_eplb and self.dp_size > 1:
                raise ConfigError(
                    "--enable-eplb needs --nnodes 1 or --dp-size 1: each rank counts its rows, got "
                    f"--nnodes {self.nnodes} and --dp-size {self.dp_size}"
                )
        elif self.dist_init_addr:
            raise ConfigError("--dist-init-addr needs --nnodes above 1: one node meets nobody")

    @property
    def own_devices(self) -> int:
        """Devices of this process."""
        return self.dp_size * self.tp_size // self.nnodes

    @property
    def meeting_host(self) -> str:
        """Node 0's host, without brackets; "" for a process alone."""
        return split_host_port(self.dist_init_addr)[0] if self.dist_init_addr else ""

    @property
    def reached_by(self) -> dict[str, str]:
        """Hosts by which peers reach this process, by flag."""
        if self.node_rank:
            return {}
        hosts = {"--host": self.host}
        if self.nnodes > 1:
            hosts["--dist-init-addr"] = self.meeting_host
        return hosts

    @property
    def placing(self) -> ExpertPolicy:
        """Where experts are placed, and when they move."""
        return ExpertPolicy(**{name: getattr(self, name) for name in PLACING})

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path.resolve().name


def check_devices(tp_size: int, dp_size: int) -> None:
    """Raises ConfigError if a worker would have more devices than it may."""
    if dp_size * tp_size > MAX_DEVICES:
        raise ConfigError(
            f"--dp-size {dp_size} x --tp-size {tp_size}: at most {MAX_DEVICES} devices, got "
            f"{dp_size * tp_size}"
        )


def check_experts(ep_size: int, tp_size: int, dp_size: int) -> None:
    """Raises ConfigError unless the parts of the experts divide the devices."""
    if ep_size <= tp_size or dp_size == 1:
        if tp_size % ep_size:
            raise ConfigError(
                f"--ep-size {ep_size} must divide --tp-size {tp_size}: experts are spread over the "
                "devices of a data-parallel rank"
            )
    elif ep_size % dp_size or tp_size % (ep_size // dp_size):
        raise ConfigError(
            f"--ep-size {ep_size} is above --tp-size {tp_size}: data-parallel ranks then share the "
            f"experts, and it must be --dp-size {dp_size} times a divisor of the tp size"
        )
