"""The configuration that prefill and decode workers share, its validation, and what flags mean."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from model.eplb import TRIVIAL, ExpertPolicy
from transfer import nixl_agent, watchdog
from transfer.checks import (
    MAX_TIMEOUT_S,
    NamedPath,
    above_zero,
    at_least,
    at_most,
    check_port,
    has_an_end,
    is_folder,
    reachable,
)
from transfer.errors import ConfigError
from transfer.flag_names import flag_name
from transfer.ports import is_loopback, split_host_port

MAX_DEVICES = 1024  # as many virtual devices as a CPU can still make
MAX_THREADS = 4096
MAX_KEPT_RATIO = 1_000_000
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
    lora_paths: tuple[NamedPath, ...] = ()  # adapters, each a model of its own in the API
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
    enable_hierarchical_cache: bool = False  # evicted prefixes stay in the host's memory
    hicache_ratio: float = 2.0  # pages there for each page in the pools of all ranks
    hicache_size: int = 0  # 10^9 bytes; 0 = by the ratio
    max_queued_requests: int = 1024
    disaggregation_transfer_backend: Literal["auto", "nixl", "shm", "tcp"] = "auto"
    drain_timeout_s: float = 30.0  # the most time for begun rooms to finish, once told to leave
    stall_timeout_s: float = 3.0  # a data connection that moves nothing for so long is lost
    profile_dir: str = ""  # where profiles are written; "" = each is refused
    profile_timeout_s: float = 1.0  # a profile ends by itself after so long
    watchdog_timeout_s: float = watchdog.TIMEOUT_S

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
        above_zero(self, "profile_timeout_s")
        at_most(self, "profile_timeout_s", MAX_TIMEOUT_S)
        if self.profile_dir:
            is_folder("--profile-dir", Path(self.profile_dir))
        watchdog.check(self)
        if not 0.0 <= self.mem_fraction_static <= 1.0:
            raise ConfigError(
                f"--mem-fraction-static must be in [0, 1], got {self.mem_fraction_static}"
            )
        check_port(self, "port")
        check_kept(self)
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ConfigError(
                "--enable-hierarchical-cache keeps what the prefix cache evicts, got "
                "--disable-radix-cache"
            )
        self._check_adapters()
        if self.disaggregation_transfer_backend == "nixl":
            nixl_agent.find()

    def _check_adapters(self) -> None:
        """Raises ConfigError for names that do not tell a client's models apart."""
        if self.model_name in check_named_once(self.lora_paths):
            raise ConfigError(
                f"--lora-paths: {self.model_name!r} is the model's own name; name the adapter or "
                "the model (--served-model-name) otherwise"
            )

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
            is_folder("--expert-distribution-file", folder)
        if self.ep_size == 1:
            usual = WorkerConfig.__dataclass_fields__
            for name in ("ep_num_redundant_experts", "init_expert_location", "enable_eplb"):
                if getattr(self, name) != usual[name].default:
                    raise ConfigError(f"{flag_name(name)} needs --ep-size above 1, got 1")
        if self.init_expert_location != TRIVIAL:
            has_an_end("--init-expert-location", Path(self.init_expert_location))

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
            self._check_reached()
        elif self.dist_init_addr:
            raise ConfigError("--dist-init-addr needs --nnodes above 1: one node meets nobody")

    def _check_reached(self) -> None:
        """Raises ConfigError if nodes of other hosts could meet this one but not hear it."""
        if self.node_rank or not is_loopback(self.host) or is_loopback(self.meeting_host):
            return
        raise ConfigError(
            f"--host {self.host} is where node 0 says what to do: nodes of other hosts, which "
            f"--dist-init-addr {self.dist_init_addr} is for, cannot reach it there"
        )

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """By rank, the node that has each of its shards: nodes have their devices in order."""
        devices = range(self.dp_size * self.tp_size)
        of_all = [device // self.own_devices for device in devices]
        starts = range(0, len(of_all), self.tp_size)
        return tuple(tuple(of_all[at : at + self.tp_size]) for at in starts)

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


def check_kept(config: Any) -> None:
    """Raises ConfigError for a number of pages in the host's memory that makes no sense."""
    above_zero(config, "hicache_ratio")
    at_most(config, "hicache_ratio", MAX_KEPT_RATIO)
    at_least(config, "hicache_size", 0)


def check_named_once(lora_paths: Sequence[NamedPath]) -> list[str]:
    """The adapters' names. Raises ConfigError if two are the same."""
    names = [adapter.name for adapter in lora_paths]
    if len(set(names)) < len(names):
        raise ConfigError(f"--lora-paths must name each adapter once, got {', '.join(names)}")
    return names


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


# Of all flags of both roles; each role has fields of its own besides those above.
WORKER_HELP = {
    "model_path": "checkpoint folder: Hugging Face layout, or made by `kvferry convert`",
    "registry_address": "host:port of the registry",
    "host": "address to listen on, by which peers reach this process",
    "port": "port to listen on; 0 picks one",
    "worker_id": "name in the cluster; '': made from role, host and port",
    "served_model_name": "model name in the log and in /get_server_info; '': the folder's name; in "
    "the API the model has the name that `serve` is given",
    "load_format": "auto: load the folder's weights; dummy: make random ones, to measure speed",
    "lora_paths": "low-rank adapters, folders as PEFT writes them, each served as the model NAME",
    "dtype": "type of weights and products; auto: float32 on CPU, else the checkpoint's",
    "context_length": "maximum tokens of a request, prompt and output; 0: the model's (at most "
    "4096 on CPU)",
    "cpu_threads": "number of XLA threads, at least one per device; 0: on CPU, one for a hidden "
    "size of at most 256, else one for each processor that this process may use (affinity and "
    "container quota)",
    "tp_size": "devices that share each layer, in each data-parallel rank (virtual ones on CPU)",
    "ep_size": "parts into which the experts are divided: a divisor of --tp-size if each "
    "data-parallel rank has its own experts; if the ranks share them, --dp-size times a divisor, "
    "and above --tp-size",
    "ep_num_redundant_experts": "copies of experts that each layer has in addition; the experts "
    "chosen by most rows are copied, to other parts",
    "init_expert_location": "where experts are placed at the start: trivial, or a JSON file with "
    "physical_to_logical_map or logical_count",
    "enable_eplb": "count the rows that choose each expert, and move experts while serving so that "
    "all parts get about as many rows",
    "expert_distribution_file": "file to which the rows of each expert are written whenever they "
    "are counted; --init-expert-location reads such a file; '': none",
    "eplb_rebalance_num_iterations": "number of steps or chunks between two placements of the "
    "experts",
    "eplb_rebalance_layers_per_chunk": "number of layers whose experts move between two steps or "
    "chunks; 0: all",
    "eplb_min_rebalancing_utilization_threshold": "leave a layer as it is if its mean part has at "
    "least this share of the rows of its fullest part",
    "dp_size": "number of data-parallel ranks, each with --tp-size devices and its own pages",
    "nnodes": "number of processes, possibly on several hosts, whose devices form one mesh; start "
    "each with the same flags and its own --node-rank",
    "node_rank": "which of the --nnodes processes this is; 0 leads, and the others only ship "
    "their own pages",
    "dist_init_addr": "host:port where node 0 waits for the other nodes; for --nnodes above 1",
    "page_size": "tokens in a page; 0: 16 on CPU, else 64",
    "max_total_tokens": "tokens in the page pool of each data-parallel rank; 0: as many as fit in "
    "memory",
    "mem_fraction_static": "share of memory for weights, scratch and pages, on CPU of free memory "
    "and beside the weights; 0: 0.85, on CPU 0.1, or up to 0.3 if four full contexts need more",
    "kv_cache_dtype": "type of pages; auto: that of --dtype; fp8_e4m3: one byte a value",
    "quantization": "type of the layers' weights in memory. none: --dtype; fp8, int8: one byte "
    "each, kept as published if already quantised, else rounded; auto: quantised weights are kept "
    "as published on CPU, all others have --dtype",
    "max_queued_requests": "maximum number of requests held, running ones included",
    "disaggregation_transfer_backend": "how pages travel. auto: shared memory within a host, else "
    "tcp; shm: shared memory only; nixl: RDMA or UCX, by an optional package",
    "max_frame_bytes": "maximum bytes of pages sent as one frame",
    "drain_timeout_s": "seconds in which a worker told to leave (SIGTERM, POST /drain) may finish "
    "the requests that it has",
    "profile_dir": "folder in which POST /start_profile has this worker write what its devices and "
    "threads do; '': profiles are refused",
    "profile_timeout_s": "seconds after which a profile ends unless POST /stop_profile ends it",
    "stall_timeout_s": "seconds without progress after which a data connection counts as lost",
    "watchdog_timeout_s": watchdog.HELP,
    "chunked_prefill_size": "maximum prompt tokens computed at once; 0: 512 on CPU, else 8192, or "
    "2048 where decode computes prompts",
    "max_seqs_per_chunk": "maximum number of prompts packed into one chunk",
    "transfer_connections": "maximum number of data connections to each decode worker; 0: one for "
    "each two processors that this process may use (affinity and container quota), at most 2",
    "transfer_queue_bytes": "bytes of pages that may wait in host memory for one decode worker; "
    "while more wait, its prompts are not computed",
    "disable_radix_cache": "do not reuse the pages of earlier prompts that begin alike",
    "load_balance_method": "how a prompt is given to one of the data-parallel ranks that have room",
    "enable_hierarchical_cache": "keep the pages of prefixes that the pool has no room for in the "
    "host's memory, and copy them back for prompts that begin with them",
    "hicache_ratio": "pages kept in the host's memory for each page in the pools of all "
    "data-parallel ranks",
    "hicache_size": "GB (10^9 bytes) of the host's memory for such pages; 0: by --hicache-ratio",
    "max_running_requests": "slots: maximum number of requests decoded at once, over all "
    "data-parallel ranks; 0: 16 on CPU, else 256, for each rank",
    "local_prefill_tokens": "maximum tokens of a prompt that decode computes itself, without "
    "prefill; 0: none, -1: any prompt",
    "headroom_pages": "pages that must stay free for running requests to grow when another is let "
    "in",
    "speculative_algorithm": "how a step drafts tokens; a draft counts only if the step draws that "
    "very token. NGRAM: drafts are what followed the last tokens where these occurred before",
    "speculative_num_draft_tokens": "maximum tokens drafted for a slot in a step; a step of "
    "several slots of a rank drafts only if their number, rounded up to a power of two, times "
    "(1 + drafts) is at most the slots of the rank (see --max-running-requests)",
    "speculative_ngram_min_match_window_size": "minimum number of last tokens that must have "
    "occurred before",
    "speculative_ngram_max_match_window_size": "maximum number of last tokens that are compared; "
    "the longest match is used",
    "data_host": "address on which pages are received; '': that of --host",
    "data_port": "port on which pages are received; 0 picks one",
    "transfer_staging_bytes": "maximum bytes of memory for each data connection from this "
    "host, and for each with nixl; 0: 128 MiB, or four frames for each shard if that is more",
}
