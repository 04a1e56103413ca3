"""When each chunk of a prompt was computed and sent, and how that is told."""

from dataclasses import dataclass

from transfer import wire
from transfer.backend import Shipped
from transfer.role import micros

MAX_CHUNKS = 256  # told of one prompt; what comes after them widens the last


@dataclass(slots=True)
class ChunkTimes:
    """One chunk of one prompt. Times are monotonic seconds; 0.0: did not happen."""

    num_tokens: int
    dispatched_s: float
    page_end: int  # its pages are before this one; 0: it completes none
    computed_s: float = 0.0  # known here; the device may have been done earlier
    shipped_s: float = 0.0  # its pages are the data plane's


def next_chunk(
    chunks: list[ChunkTimes], num_tokens: int, dispatched_s: float, page_end: int
) -> ChunkTimes:
    """The times of the chunk after these; the last of these once there are too many."""
    if len(chunks) == MAX_CHUNKS:
        last = chunks[-1]
        last.num_tokens += num_tokens
        last.page_end = page_end or last.page_end
        return last
    chunks.append(ChunkTimes(num_tokens, dispatched_s, page_end))
    return chunks[-1]


def told_times(chunks: list[ChunkTimes], shipped: Shipped | None, since_s: float) -> bytes:
    """As wire.LegRecord.chunks."""
    rows = []
    for chunk in chunks:
        times = (chunk.dispatched_s, chunk.computed_s, chunk.shipped_s, _left_s(chunk, shipped))
        rows.append([chunk.num_tokens, *(_offset(time_s, since_s) for time_s in times)])
    return wire.pack_i64(rows)


def told_shipment(shipped: Shipped | None, since_s: float) -> wire.Shipment | None:
    """As wire.LegRecord.shipment; None when nothing was sent."""
    if shipped is None or not shipped.num_frames:
        return None
    times = (shipped.first_s, shipped.last_s, shipped.acked_s)
    offsets = (_offset(time_s, since_s) for time_s in times)
    return wire.Shipment(shipped.way, shipped.num_bytes, shipped.num_frames, *offsets)


def _left_s(chunk: ChunkTimes, shipped: Shipped | None) -> float:
    """When the last of the chunk's pages left. A frame never has pages of two chunks."""
    return 0.0 if shipped is None else shipped.page_ends.get(chunk.page_end, 0.0)


def _offset(time_s: float, since_s: float) -> int:
    return micros(time_s - since_s) if time_s else -1
