"""When each chunk of a prompt was computed and sent, and how a LegRecord says so."""

from dataclasses import dataclass

from transfer import wire
from transfer.backend import Shipped

MAX_CHUNKS = 256  # reported for one prompt; later chunks are added to the last one


def micros(seconds: float) -> int:
    """Seconds to microseconds, the unit of offsets in a wire.LegRecord."""
    return round(seconds * 1e6)


@dataclass(slots=True)
class ChunkTimes:
    """One chunk of one prompt. Times are monotonic seconds; 0.0: did not happen."""

    num_tokens: int
    dispatched_s: float
    page_end: int  # one past the chunk's last page; 0: it completes none
    computed_s: float = 0.0  # known here to be computed; the device may have been done earlier
    shipped_s: float = 0.0  # its pages were handed to the data plane


def next_chunk(
    chunks: list[ChunkTimes], num_tokens: int, dispatched_s: float, page_end: int
) -> ChunkTimes:
    """Append a chunk and return its times; once there are MAX_CHUNKS, widen the last one."""
    if len(chunks) == MAX_CHUNKS:
        last = chunks[-1]
        last.num_tokens += num_tokens
        last.page_end = page_end or last.page_end
        return last
    chunks.append(ChunkTimes(num_tokens, dispatched_s, page_end))
    return chunks[-1]


def told_times(chunks: list[ChunkTimes], shipped: Shipped | None, since_s: float) -> bytes:
    """The bytes of wire.LegRecord.chunks."""
    rows = []
    for chunk in chunks:
        times = (chunk.dispatched_s, chunk.computed_s, chunk.shipped_s, _left_s(chunk, shipped))
        rows.append([chunk.num_tokens, *(_offset(time_s, since_s) for time_s in times)])
    return wire.pack_i64(rows)


def told_shipment(shipped: Shipped | None, since_s: float) -> wire.Shipment | None:
    """The value of wire.LegRecord.shipment; None when nothing was sent."""
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
