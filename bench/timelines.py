"""Adds rows from the server's own timelines to a load: where the time to the first token went."""

import asyncio
import math
import statistics
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from bench.client import MALFORMED, Server, get_json
from bench.report import Report

_AT_ONCE = 8
_TIMEOUT_S = 10.0


async def read_timelines(server: Server, request_ids: Sequence[str]) -> list[Any]:
    """Timelines of these requests, if the server keeps timelines and still has them.

    Once one does not come in time, no more are asked for: a server that hangs would take that time
    for each of them. They are whatever the server answered: `report_timelines` leaves out what it
    cannot read.
    """
    limit = asyncio.Semaphore(_AT_ONCE)
    hangs = False

    async def one(request_id: str) -> Any:
        nonlocal hangs
        async with limit:
            if hangs:
                return None
            path = f"/requests/{quote(request_id, safe='', errors='replace')}/timeline"
            try:
                status, body = await get_json(server, path, _TIMEOUT_S)
            except TimeoutError:
                hangs = True
                return None
            except OSError:
                return None
        return body if status == 200 else None

    found = await asyncio.gather(*(one(request_id) for request_id in request_ids if request_id))
    return [body for body in found if body is not None]


def report_timelines(
    report: Report, case: str, timelines: Sequence[Any], shapes: dict[str, Any]
) -> None:
    """Add rows for the requests with a single, completely reported attempt; none without those.

    They are medians over requests. Two are shares of the server's time to the first token: in one,
    prefill waited for decode's grant; in the other, it handed computed pages to the data plane,
    counted as if nothing had been computed meanwhile, so it bounds what the transfer added. Two
    more say what share of the transfer's time passed before the last chunk was computed, and how
    long the rest took, for which the second token waits.
    """
    told = [parts for timeline in timelines if (parts := _told(timeline)) is not None]
    if not told:
        return
    metrics = (
        ("chunks a prompt", "count"),
        ("grant wait", "% TTFT"),
        ("transfer", "% TTFT"),
        ("transfer behind computing", "share"),
        ("transfer after last chunk", "ms"),
    )
    for (metric, unit), values in zip(metrics, zip(*told, strict=True), strict=True):
        report.add(case, metric, statistics.median(values), unit, shapes=shapes)


def _told(timeline: Any) -> tuple[float, ...] | None:
    """The timeline's `_parts`; None also if another server answered something else."""
    try:
        parts = _parts(timeline)
    except MALFORMED:
        return None
    return parts if parts is not None and all(map(math.isfinite, parts)) else None


def _parts(timeline: dict[str, Any]) -> tuple[float, ...] | None:
    """(chunks, grant wait %, handing over %, share overlapped, ms left) of one request, or None."""
    ttft_ms = timeline["first_write_ms"]
    attempts = timeline["choices"][0]["attempts"]
    if len(attempts) != 1 or not ttft_ms:
        return None
    prefill = attempts[0]["prefill"]
    # None where decode computed the prompt itself: then nothing was transferred.
    if prefill is None or not prefill["reported"]:
        return None
    moved, chunks = prefill["transfer"], prefill["chunks"]
    if moved is None or moved["acked_ms"] is None or prefill["grant_wait_ms"] is None:
        return None
    handing_ms = sum(chunk["handed_over_ms"] - chunk["end_ms"] for chunk in chunks)
    computed_ms = chunks[-1]["end_ms"]
    whole_ms = moved["acked_ms"] - moved["first_byte_ms"]
    before_ms = max(computed_ms - moved["first_byte_ms"], 0.0)
    return (
        float(len(chunks)),
        100 * prefill["grant_wait_ms"] / ttft_ms,
        100 * handing_ms / ttft_ms,
        before_ms / whole_ms if whole_ms else 0.0,
        moved["acked_ms"] - computed_ms,
    )
