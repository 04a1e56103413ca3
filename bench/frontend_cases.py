"""Defines what the front end benchmark compares: designs, paces, and the cases of a run."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.frontend_designs import DESIGNS
from bench.frontend_plan import MOST_STREAMS, Cell, Dialect

STREAMS = (64, 256, 1024, 2048)
INTERVALS = (1, 8)
_LEAST_SPACING_S = 1e-3  # between requests of paced cells, so that a server can take them in
_CHAT = Dialect()
_RESPONSES = Dialect("/v1/responses", opening=4)
_MESSAGES = Dialect("/v1/messages", opening=2)
_CONVERSATION = [{"role": "user", "content": "Tell me of the harbour."}]
_PAYLOAD = {
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
}


@dataclass(frozen=True)
class Design:
    """A way from a step to bytes. interval: tokens per event; 0: the server decides.

    module, server_args: the server; designs with the same server share a process.
    """

    name: str
    module: str
    server_args: tuple[str, ...] = ()
    interval: int = 1
    dialect: Dialect = _CHAT

    @property
    def is_floor(self) -> bool:
        """Whether it is served by bench/frontend_floor, which speaks neither gRPC nor HTTP."""
        return self.module == _FLOOR

    @property
    def is_native(self) -> bool:
        """Whether it is the compiled floor."""
        return self == NATIVE_FLOOR

    @property
    def is_peer(self) -> bool:
        """Whether it is another project's front end, run by a Python of its own."""
        return self in PEERS

    @property
    def is_product(self) -> bool:
        return self.module == _PRODUCT

    def payload(self, cell: Cell) -> dict[str, Any]:
        """The JSON body of a request of the cell."""
        if self.dialect == _RESPONSES:
            asked = {"input": _CONVERSATION, "max_output_tokens": cell.output_tokens}
        else:
            asked = {"messages": _CONVERSATION, "max_tokens": cell.output_tokens}
        payload = _PAYLOAD | asked
        if self.is_peer or not self.interval:
            return payload
        return payload | {"stream_interval": self.interval}


_PRODUCT = "serving"
_FLOOR = "bench.frontend_floor"
ALL = Design("all", _PRODUCT)  # the product as it is
AUTO = Design("auto", _PRODUCT, ("--stream-interval", "auto"), interval=0)
NATIVE_FLOOR = Design("native floor", _FLOOR)
PEERS = (
    Design("sglang", "bench.frontend_sglang"),
    Design(
        "vllm", "bench.frontend_vllm", dialect=Dialect(id_field="request_id", id_prefix="chatcmpl-")
    ),
)
PEER_NAMES = tuple(peer.name for peer in PEERS)
# In the order in which they are measured.
_KNOWN = (
    *(Design(name, "bench.frontend_designs", ("--design", name)) for name in DESIGNS),
    ALL,
    AUTO,
    Design("responses", _PRODUCT, dialect=_RESPONSES),
    Design("messages", _PRODUCT, dialect=_MESSAGES),
    *PEERS,
    Design("floor", _FLOOR),
    NATIVE_FLOOR,
)
DESIGN_NAMES = tuple(design.name for design in _KNOWN)


def all_of(interval: int) -> Design:
    """The product with this many tokens an event."""
    return ALL if interval == 1 else Design(f"all, interval {interval}", _PRODUCT, (), interval)


# Naive first: it is the baseline. A cell costs what its slowest design takes, so not every design
# runs at every pace; all of them can be asked for.
_USUAL = {
    "saturated": (*DESIGNS, "all", "floor"),
    "paced": ("naive", "grouped+json", "all", "auto", "floor"),
    "overload": ("naive", "all", "auto", "floor"),
    "backlog": ("naive", "grouped+json", "all", "auto", "floor"),
}
PACES = tuple(_USUAL)
_ROUNDS = {"saturated": 3}  # by default; 1 at the other paces, whose ratios need not be as exact


@dataclass(frozen=True)
class Case:
    """A cell and what is compared in it, the baseline first."""

    cell: Cell
    designs: tuple[Design, ...]
    rounds: int
    tokens: int  # of a round that is not paced, about

    def cell_of(self, design: Design) -> Cell:
        return replace(self.cell, interval=design.interval)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases that the arguments ask for: all paces of the fewest streams first.

    Raises ValueError when nothing is left, or a value is out of range.
    """
    _check(args)
    streams = sorted(set(args.streams or STREAMS))
    cases = []
    for num_streams in streams:
        for pace in PACES:
            if pace not in (args.pace or PACES):
                continue
            if pace == "overload" and not args.pace and num_streams != streams[-1]:
                continue  # fewer streams are no overload
            designs = _designs(pace, args.design or _USUAL[pace], args.interval or INTERVALS)
            if designs:
                cell = _cell(pace, num_streams, args)
                rounds = args.rounds or _ROUNDS.get(pace, 1)
                cases.append(Case(cell, designs, rounds, args.tokens))
    if not cases:
        raise ValueError("auto is not steered by events, so it has no saturated cell")
    return cases


def _check(args: argparse.Namespace) -> None:
    for name, known in (("pace", PACES), ("design", DESIGN_NAMES)):
        for value in getattr(args, name) or ():
            if value not in known:
                raise ValueError(f"--{name} {value!r} is unknown; known: {', '.join(known)}")
    for name in PEER_NAMES:
        if name in (args.design or ()) and not getattr(args, f"{name}_python"):
            raise ValueError(f"--design {name} needs --{name}-python PATH, a Python with {name}")
    lowest = {"output_tokens": 2, "rounds": 1, "tokens": 1}
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    for name in ("streams", "interval"):
        for value in getattr(args, name) or ():
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
    for value in args.streams or ():
        if value > MOST_STREAMS:
            raise ValueError(f"--streams must be at most {MOST_STREAMS}, got {value}")


def _designs(pace: str, names: Sequence[str], intervals: Sequence[int]) -> tuple[Design, ...]:
    """The designs named, in the order of DESIGN_NAMES; `all` once for each interval."""
    found: list[Design] = []
    for design in _KNOWN:
        if design.name not in names or (design == AUTO and pace == "saturated"):
            continue
        found += map(all_of, sorted(set(intervals))) if design == ALL else [design]
    return tuple(found)


def _cell(pace: str, num_streams: int, args: argparse.Namespace) -> Cell:
    if pace == "saturated":
        return Cell(num_streams, args.output_tokens, 1)
    if pace == "backlog":
        return Cell(num_streams, args.output_tokens, 1, "backlog")
    step_s = (args.step_ms if pace == "paced" else args.overload_step_ms) / 1e3
    # The rate at which streams end and others take their place, when so many are running.
    spacing_s = max(_LEAST_SPACING_S, args.output_tokens * step_s / num_streams)
    return Cell(num_streams, args.output_tokens, 1, "paced", step_s, spacing_s)
