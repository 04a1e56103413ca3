"""The requests of a load test: lengths, contents and arrival times, all from one seed."""

import math
from dataclasses import dataclass, replace

import numpy as np

from bench.arguments import INT32_MAX

_WARM_UP_SEEDS = 1 << 32
_MOST_OF_PREFIXES = 1 << 27  # tokens of all together, which are drawn first: 1 GiB


@dataclass(frozen=True)
class WorkloadConfig:
    """What to send and when.

    input_tokens, output_tokens: means; spread 0.5 draws lengths evenly from half to one and a half
    times the mean, 0 sends exactly the mean. shared_prefix_tokens: tokens at the start of every
    prompt, which has one of num_prefixes in turn. lora_name: adapters that requests name, in turn;
    none: they name the model. rate_per_s: Poisson arrivals; None keeps `concurrency` requests in
    flight instead. repeat_token: a bias makes answers consist of this id, which shows the most that
    drafts of tokens can gain; None: no bias.
    Raises ValueError naming the flag that makes no sense.
    """

    num_requests: int = 64
    input_tokens: int = 512
    output_tokens: int = 128
    spread: float = 0.0
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    lora_name: tuple[str, ...] = ()
    rate_per_s: float | None = None
    concurrency: int = 8
    vocab_size: int = 1000
    seed: int = 0
    repeat_token: int | None = None

    def __post_init__(self) -> None:
        counts = "num_requests", "num_prefixes", "concurrency"
        for name in (*counts, "input_tokens", "output_tokens", "vocab_size"):
            flag, least = name.replace("_", "-"), 2 if name == "vocab_size" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{flag} must be at least {least}, got {getattr(self, name)}")
            if getattr(self, name) > INT32_MAX:
                raise ValueError(f"--{flag} must be at most {INT32_MAX}, got {getattr(self, name)}")
        if self.repeat_token is not None and not 0 <= self.repeat_token <= INT32_MAX:
            raise ValueError(f"--repeat-token must be in [0, {INT32_MAX}], got {self.repeat_token}")
        if not 0.0 <= self.spread < 1.0:
            raise ValueError(f"--spread must be in [0, 1), got {self.spread}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"--rate must be above 0 and finite, got {self.rate_per_s}")
        if not 0 <= self.shared_prefix_tokens <= self.input_tokens:
            raise ValueError(
                f"--shared-prefix-tokens must be in [0, {self.input_tokens}], "
                f"got {self.shared_prefix_tokens}"
            )
        if self.num_prefixes * self.shared_prefix_tokens > _MOST_OF_PREFIXES:
            raise ValueError(
                f"--num-prefixes times --shared-prefix-tokens must be at most {_MOST_OF_PREFIXES}, "
                f"got {self.num_prefixes} times {self.shared_prefix_tokens}"
            )

    @property
    def most_tokens(self) -> int:
        """Of the longest prompt and the longest answer together."""
        means = self.input_tokens, self.output_tokens
        return sum(_bounds(mean, self.spread)[1] for mean in means)


@dataclass(frozen=True)
class PlannedRequest:
    """One request. arrival_s: after the start of the run; 0 when arrivals are not paced.

    adapter: "" for the model alone.
    """

    arrival_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    adapter: str = ""


def plan_requests(config: WorkloadConfig) -> list[PlannedRequest]:
    """The requests of a workload. The same config gives the same requests for any server."""
    rng = np.random.default_rng(config.seed)
    shape = config.num_prefixes, config.shared_prefix_tokens
    prefixes = rng.integers(0, config.vocab_size, shape)
    arrivals = np.zeros(config.num_requests)
    if config.rate_per_s is not None:
        arrivals = np.cumsum(rng.exponential(1.0 / config.rate_per_s, config.num_requests))
        arrivals -= arrivals[0]
    names = config.lora_name or ("",)
    planned = []
    for place, arrival_s in enumerate(arrivals):
        prefix = prefixes[place % config.num_prefixes]
        length = max(_draw(rng, config.input_tokens, config.spread), len(prefix) + 1)
        if config.spread == 0.0:
            length = config.input_tokens
        rest = rng.integers(0, config.vocab_size, length - len(prefix))
        planned.append(
            PlannedRequest(
                arrival_s=float(arrival_s),
                prompt_ids=tuple(int(x) for x in np.concatenate([prefix, rest])),
                output_tokens=_draw(rng, config.output_tokens, config.spread),
                adapter=names[place % len(names)],
            )
        )
    return planned


def plan_warm_up(config: WorkloadConfig, count: int) -> list[PlannedRequest]:
    """Requests like those of the load, but of other tokens: prefix caches learn nothing of it."""
    return plan_requests(replace(config, num_requests=count, seed=config.seed + _WARM_UP_SEEDS))


def _draw(rng: np.random.Generator, mean: int, spread: float) -> int:
    least, most = _bounds(mean, spread)
    return int(rng.integers(least, most + 1))


def _bounds(mean: int, spread: float) -> tuple[int, int]:
    """The least and the most that is drawn."""
    return max(round(mean * (1.0 - spread)), 1), max(round(mean * (1.0 + spread)), 1)
