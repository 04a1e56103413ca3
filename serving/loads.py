"""Reports the workers' loads in the format of SGLang's /v1/loads, which its routers read.

Fields are those of sgl-project/sglang: python/sglang/srt/entrypoints/v1_loads.py, its section core
and the mode of disagg; `worker_id` is beside them.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from serving.errors import bad_field, not_served, quoted
from transfer import wire


def loads_answer(
    members: Iterable[wire.Member], now_s: float, query: Mapping[str, str]
) -> dict[str, Any]:
    """One entry for each rank of every worker. query: dp_rank leaves out all others.

    Raises ApiError for a rank that is no number, and for a format that is not JSON.
    """
    if query.get("format", "json") != "json":
        raise not_served("format")
    only = query.get("dp_rank")
    if only is not None and not (only.isascii() and only.isdigit()):
        raise bad_field("dp_rank", f"expected a number, got {quoted(only)}")
    return {
        "timestamp": datetime.fromtimestamp(now_s, tz=UTC).isoformat(),
        "version": metadata.version("kvferry"),
        "loads": [
            _entry(member, rank, load)
            for member in members
            for rank, load in enumerate(member.ranks or (member.load,))
            if only is None or rank == int(only[:9])
        ],
    }


def _entry(member: wire.Member, rank: int, load: wire.Load) -> dict[str, Any]:
    page_size = member.info.kv_spec.page_size
    pages_used = load.pages_total - load.pages_free
    num_used = pages_used * page_size
    return {
        "dp_rank": rank,
        "worker_id": member.info.worker_id,
        "num_running_reqs": load.running_requests,
        "num_waiting_reqs": load.queued_requests,
        "num_used_tokens": num_used,
        "num_total_tokens": num_used + load.queued_tokens,
        "max_total_num_tokens": load.pages_total * page_size,
        "token_usage": pages_used / load.pages_total if load.pages_total else 0.0,
        "max_running_requests": load.slots_total,
        "disaggregation": {"mode": member.info.role},
    }
