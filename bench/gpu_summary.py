"""Summarises a run of gpu_check on one screen, by its most telling rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.report import Row, format_number

_HEADER = f"{'':44} {'value':>10} {'unit':9} share of floor"
_WHOLE = (" decode step ", " prefill chunk ")


def summary(rows: Sequence[Row]) -> str:
    """Ceilings, steps and chunks beside their floor, pages, serving, numbers checked, seconds.

    Of a measurement that was repeated, the first row counts.
    """
    chosen: tuple[Callable[[Row], bool], ...] = (
        lambda row: row.case == "ceiling",
        lambda row: row.metric == "time" and any(name in row.case for name in _WHOLE),
        lambda row: row.case.endswith(" pages") and row.unit == "GB/s",
        lambda row: row.metric == "output",
    )
    lines = [_HEADER]
    for wanted in chosen:
        lines += _lines(row for row in rows if wanted(row))
    lines += _checked(rows)
    lines += _lines(row for row in rows if row.metric == "part")
    return "\n".join(lines)


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    seen = set()
    for row in rows:
        if row.key in seen:
            continue
        seen.add(row.key)
        share = row.baseline / row.value if row.metric == "time" and row.baseline else None
        name = row.case if row.metric == "time" else f"{row.case}: {row.metric}"
        number = format_number(row.value)
        yield f"{name:44} {number:>10} {row.unit:9} {format_number(share)}".rstrip()


def _checked(rows: Iterable[Row]) -> Iterator[str]:
    """How many checkpoints and kernel backends gave the right numbers."""
    good: dict[str, dict[str, bool]] = {}
    for row in rows:
        if "golden" in row.shapes:
            kind, name = f"goldens {row.shapes['dtype']}", row.shapes["golden"]
        elif row.metric.endswith(" off reference"):
            kind, name = f"{row.shapes['shape']} backends", f"{row.case} {row.metric}"
        else:
            continue
        of_kind = good.setdefault(kind, {})
        of_kind[name] = of_kind.get(name, True) and row.value <= (row.baseline or 0.0)
    for kind, found in good.items():
        yield f"{kind:44} {sum(found.values()):>10} of {len(found)}"
