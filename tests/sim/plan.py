"""What one seed plays: sizes, workload and how much goes wrong."""

from dataclasses import dataclass
from random import Random
from typing import get_args

from decode.config import ANY_PROMPT
from prefill.balancer import METHODS, Method
from serving.config import Policy

NEVER = 100_000  # retries, and seconds


@dataclass(frozen=True)
class WorkerPlan:
    """Sizes of one worker, the same for each of its incarnations."""

    worker_id: str
    num_pages: int
    page_size: int
    context: int
    tp_size: int
    logical_heads: int
    stored_heads: int
    max_queued: int
    max_frame_bytes: int
    chunk_tokens: int = 0
    chunk_seqs: int = 0
    run_pages: int = 0
    num_slots: int = 0
    headroom_pages: int = 0
    dp_size: int = 1  # num_pages and num_slots count per rank
    balancing: Method = "shortest_queue"
    local_tokens: int = 0  # longest prompt that decode computes itself
    drafts: int = 0  # tokens that a step drafts for each slot
    window: int = 0  # positions that half of the layers see; 0: all see all
    queue_bytes: int = 1 << 30  # bytes that may wait for one decode worker
    host_pages: int = 0  # pages of prefixes that prefill keeps in its host's memory


@dataclass(frozen=True)
class Plan:
    """One simulation. Rates are chances per tick."""

    prefills: tuple[WorkerPlan, ...]
    decodes: tuple[WorkerPlan, ...]
    num_apis: int
    num_requests: int
    arrival: float
    limit_tokens: int  # most tokens, prompt and output, that every worker can hold
    longest_prompt: int
    worker_death: float
    death_between: float  # chance that a death comes between handling events and the turn
    api_death: float
    drain: float
    control_break: float
    data_break: float
    corrupt: float  # per frame
    lost_reply: float  # per grant, submit or abort
    duplicate: float  # per submit
    abort: float  # per request and tick
    hasty: float  # share of requests with a deadline too short for most of them
    dictated: float  # share of requests whose ranks are chosen outside
    slow: float  # per streaming client
    freeze: float
    registry_death: float
    drain_timeout_s: float
    policy: Policy
    max_inflight: int
    max_retries: int
    queue_timeout_s: float


def draw_plan(rng: Random) -> Plan:
    """Draw a plan. A third of the seeds have no trouble, so that only load can be blamed there."""
    page_size = rng.choice((2, 4, 4, 8))
    context = page_size * rng.choice((8, 12))
    window = rng.choice((0, 0, 1, page_size, 2 * page_size + 1))  # of the model they all serve
    trouble = 0.0 if rng.random() < 0.33 else rng.choice((0.5, 1.0, 2.0))

    def worker(worker_id: str) -> WorkerPlan:
        return _draw_worker(rng, worker_id, page_size, context, window)

    prefills = tuple(worker(f"prefill-{at}") for at in range(rng.choice((1, 2, 3))))
    decodes = tuple(worker(f"decode-{at}") for at in range(rng.choice((1, 2))))
    pages = min(plan.num_pages for plan in (*prefills, *decodes))
    limit_tokens = min(context, pages * page_size)
    return Plan(
        prefills=prefills,
        decodes=decodes,
        num_apis=rng.choice((1, 2)),
        num_requests=rng.choice((8, 16, 24)),
        arrival=rng.choice((0.05, 0.3, 1.0)),
        limit_tokens=limit_tokens,
        longest_prompt=limit_tokens // rng.choice((1, 4)) - 1,
        worker_death=0.004 * trouble,
        death_between=0.5,
        api_death=0.002 * trouble,
        drain=rng.choice((0.0, 0.004, 0.01)),
        control_break=0.004 * trouble,
        data_break=0.006 * trouble,
        corrupt=0.004 * trouble,
        lost_reply=0.01 * trouble,
        duplicate=0.05 if trouble else 0.0,
        abort=0.0015 * trouble,
        hasty=0.05 if trouble else 0.0,
        dictated=rng.choice((0.0, 0.3)),
        slow=rng.choice((0.0, 0.005)),
        freeze=0.001 * trouble,
        registry_death=0.001 * trouble,
        drain_timeout_s=rng.choice((0.3, 30.0, 30.0)) if trouble else NEVER,
        policy=rng.choice(get_args(Policy)),
        max_inflight=rng.choice((2, 8, 256)),
        max_retries=rng.choice((1, 3, NEVER)) if trouble else NEVER,
        queue_timeout_s=rng.choice((1.0, NEVER, NEVER)) if trouble else NEVER,
    )


def _draw_worker(
    rng: Random, worker_id: str, page_size: int, context: int, window: int
) -> WorkerPlan:
    full_lengths, logical_heads = rng.choice((1, 1, 1.5, 3)), 2
    tp_size = rng.choice((1, 2, 4))
    least = context // page_size  # one request of full length
    return WorkerPlan(
        worker_id=worker_id,
        num_pages=int(least * full_lengths),
        page_size=page_size,
        context=context,
        tp_size=tp_size,
        logical_heads=logical_heads,
        stored_heads=max(logical_heads, tp_size),
        max_queued=rng.choice((4, 64)),
        max_frame_bytes=rng.choice((1, 1 << 20)),
        chunk_tokens=page_size * rng.choice((1, 1, 2, 6)),
        chunk_seqs=rng.choice((1, 2, 4)),
        run_pages=rng.choice((1, 3, 8)),
        num_slots=rng.choice((2, 4, 8)),
        headroom_pages=rng.choice((0, 1, 2)),
        dp_size=rng.choice((1, 1, 2, 3)),
        balancing=rng.choice(METHODS),
        local_tokens=rng.choice((0, 0, context // 2, ANY_PROMPT)),
        drafts=rng.choice((0, 0, 1, min(3, page_size - 1))),
        window=window,
        queue_bytes=rng.choice((0, 100, 1 << 30)),
        host_pages=rng.choice((0, 1, 3, 3 * least)),
    )
