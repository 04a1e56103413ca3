"""The floor of routes through the registry: the same messages, as bytes, through a plain relay.

Turns come at the same times between the same three ends, but without a protocol. Run as a program,
this module is the relay, the process in the middle.
"""

import asyncio
import contextlib
import random
import struct
import sys

import uvloop

from bench.endings import child, words_of
from transfer.clock import SYSTEM_CLOCK

_TOLD = struct.Struct("<d")
_TELLER, _FOLLOWER = b"t", b"f"
_SETTLE_S = 0.2


def measure(turns_per_s: float, seconds: float, seed: int) -> list[float]:
    """Seconds from end to end of each message; one message per turn, at random times."""
    with child(words_of(__name__)) as process:
        assert process.stdout is not None
        if not (port := process.stdout.readline()):
            raise RuntimeError("the relay ended early")
        return asyncio.run(_play(int(port), turns_per_s, seconds, random.Random(seed)))


async def _play(port: int, turns_per_s: float, seconds: float, rng: random.Random) -> list[float]:
    _, teller = await asyncio.open_connection("127.0.0.1", port)
    reader, follower = await asyncio.open_connection("127.0.0.1", port)
    teller.write(_TELLER)
    follower.write(_FOLLOWER)
    await asyncio.sleep(_SETTLE_S)
    seen_s: list[float] = []
    reading = asyncio.create_task(_read(reader, seen_s))
    await _tell(teller, turns_per_s, seconds, rng)
    await asyncio.sleep(_SETTLE_S)
    teller.close()
    follower.close()
    await reading
    return seen_s


async def _tell(
    teller: asyncio.StreamWriter, turns_per_s: float, seconds: float, rng: random.Random
) -> None:
    start_s = SYSTEM_CLOCK.monotonic_s()
    due_s = 0.0
    while due_s < seconds:
        due_s += rng.expovariate(turns_per_s)
        await asyncio.sleep(max(due_s - (SYSTEM_CLOCK.monotonic_s() - start_s), 0.0))
        teller.write(_TOLD.pack(SYSTEM_CLOCK.monotonic_s()))


async def _read(reader: asyncio.StreamReader, seen_s: list[float]) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (told_s,) = _TOLD.unpack(await reader.readexactly(_TOLD.size))
            seen_s.append(SYSTEM_CLOCK.monotonic_s() - told_s)


async def _relay() -> None:
    """Print a port, then pass on what tellers write to all followers, until stdin ends."""
    followers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == _FOLLOWER:
            followers.append(writer)
            return
        while data := await reader.read(4096):
            for follower in followers:
                follower.write(data)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_relay())
