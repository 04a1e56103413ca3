"""Measures the HTTP front end alone, in several designs, behind workers without a model.

It uses two cores: the servers under test share the first, and what loads them the last. The designs
of a cell are measured in turns, round by round, so that whatever else the machine does affects all
of them. Every token of every stream is accounted for: one that is lost or doubled ends the run.
"""

import argparse
import tempfile
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from bench.frontend_cases import PEER_NAMES, Case, Design, cases_of
from bench.frontend_peers import version_in
from bench.frontend_plan import Cell, tokens_of
from bench.frontend_processes import (
    Failed,
    Target,
    cpu_s,
    forget_peak_rss,
    peak_rss_mib,
    targets,
)
from bench.frontend_rows import Measured, report_case
from bench.report import Report

_WARM_UP_STREAMS = 64
_WARM_UP_STEP_S = 5e-3
_FLOOR_PIECE_BYTES = 200  # where no real design has been measured before the floor


def run(args: argparse.Namespace, report: Report) -> int:
    """Measure all cases. Raises ValueError for arguments, NoServer or Failed."""
    cases = cases_of(args)
    ids, texts = tokens_of(args.model_path)
    pythons = {name: getattr(args, f"{name}_python") for name in PEER_NAMES}
    for peer in sorted({d.name for case in cases for d in case.designs if d.is_peer}):
        report.surroundings.versions[peer] = version_in(pythons[peer], peer)
    with tempfile.TemporaryDirectory() as name:
        for _, some in groupby(cases, key=lambda case: case.cell.num_streams):
            same_streams = list(some)
            designs = list(dict.fromkeys(d for case in same_streams for d in case.designs))
            words = designs, args.model_path, ids, texts, args.server_args, pythons
            with targets(*words) as ready:
                bench = _Bench(ready, Path(name) / "received.npy", args.tokens)
                for case in same_streams:
                    report_case(report, case, bench.measure(case), args.server_args)
    return 0


class _Bench:
    """Servers that are ready, which of them are warm, and how long their pieces are."""

    def __init__(self, ready: dict[Design, Target], path: Path, tokens: int) -> None:
        """tokens: of a round, about. path: where clients write the times that they measured."""
        self._ready = ready
        self._path = path
        self._tokens = tokens
        self._warm: set[int] = set()
        self._piece_bytes = 0  # of one token; 0: not seen yet

    def measure(self, case: Case) -> dict[Design, list[Measured]]:
        """Rounds of every design, in turns. A server that was never loaded is warmed up first."""
        measured: dict[Design, list[Measured]] = {design: [] for design in case.designs}
        for design in case.designs:
            if self._ready[design].pid not in self._warm:
                self._warm_up(case, design)
        for _ in range(case.rounds):
            for design, rounds in measured.items():
                rounds.append(self._round(case.cell_of(design), design))
        return measured

    def _warm_up(self, case: Case, design: Design) -> None:
        num_streams = min(case.cell.num_streams, _WARM_UP_STREAMS)
        # Slowly: a server that widens its interval must not begin with a wide one.
        cell = replace(
            case.cell_of(design),
            num_streams=num_streams,
            drive="paced",
            step_s=_WARM_UP_STEP_S,
            spacing_s=0.0,
        )
        measured = Measured()
        self._play(cell, design, measured)
        # Servers that keep up merge no pieces unless the host stops one for a while, so the
        # smallest pieces have one token. Peers spell in their own way, and a floor as it is told.
        target = self._ready[design]
        if design.interval <= 1 and not design.is_peer and target.floor is None:
            self._piece_bytes = min(self._piece_bytes or measured.piece_bytes, measured.piece_bytes)
        self._warm.add(target.pid)

    def _round(self, cell: Cell, design: Design) -> Measured:
        """Play the cell until a round has its tokens; once if paced, which is long enough."""
        measured = Measured()
        repeats = max(1, self._tokens // (cell.num_streams * cell.output_tokens))
        forget_peak_rss(self._ready[design].pid)
        for _ in range(1 if cell.drive == "paced" else repeats):
            self._play(cell, design, measured)
        measured.peak_rss_mib = peak_rss_mib(self._ready[design].pid)
        return measured

    def _play(self, cell: Cell, design: Design, into: Measured) -> None:
        """Play every stream of the cell once, and add what was measured to `into`."""
        target = self._ready[design]
        engine, client = target.load.engine, target.load.client
        if target.floor is not None:
            target.floor.ask(
                cell=cell.to_json(), piece_bytes=self._piece_bytes or _FLOOR_PIECE_BYTES
            )
        engine.ask(cell=cell.to_json())
        client.ask(
            cell=cell.to_json(),
            host=target.server.host,
            port=target.server.port,
            payload=design.payload(cell),
            dialect=design.dialect.to_json(),
            path=str(self._path),
        )
        load = (engine.pid, client.pid)
        server_s, load_s = cpu_s(target.pid), sum(map(cpu_s, load))
        engine.tell(go=True)
        try:
            client.hear()  # says `ended`; it checks what it read after the clocks stop
            told = engine.hear()
        except Failed as error:
            raise Failed(f"{error}{target.who_ended()}") from error
        into.server_cpu_s += cpu_s(target.pid) - server_s
        into.load_cpu_s += sum(map(cpu_s, load)) - load_s
        into.add(cell, client.hear(), told, self._path)
