"""How one shard of a parameter is filled from tensors of a checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np

from model.checkpoint import is_finite
from model.errors import ModelError

_TILE: Final = 64
_LINE: Final = 64  # bytes of a line of the cache

Index = tuple[slice, ...]


@runtime_checkable
class Files(Protocol):
    """Where tensors are read from: a checkpoint, or what is shown of one."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """A non-empty slice of a tensor."""
        ...


@runtime_checkable
class Source(Protocol):
    """Fills one shard of a parameter. What no tensor covers (padding) stays as it is: zero."""

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that are needed."""
        ...

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        """Write the part `index` (start and stop known) of the stored parameter to `out`."""
        ...


@dataclass(frozen=True)
class Plain:
    """A parameter laid out as its tensor; any axis may be padded."""

    name: str
    shape: tuple[int, ...]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        part = tuple(_within(s, size) for s, size in zip(index, self.shape, strict=True))
        if not all(map(_length, part)):  # the last shards may be nothing but padding
            return
        filled = out[tuple(slice(0, _length(s)) for s in part)]
        if len(part) < 3:
            filled[...] = files.read(self.name, part)
            return
        for i, first in enumerate(range(part[0].start, part[0].stop)):
            # One expert at a time: all at once would take as much memory again as `out`.
            filled[i] = files.read(self.name, (slice(first, first + 1), *part[1:]))[0]


@dataclass(frozen=True)
class OnlyRow:
    """A vector from a tensor that has it as its only row."""

    name: str
    size: int

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (1, self.size)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        out[...] = files.read(self.name, (slice(0, 1), *index))[0]


@dataclass(frozen=True)
class Turned:
    """A parameter [in, out] from a tensor [out, in]; either axis may be padded.

    order: the row of the tensor for each column, where the orders differ.
    """

    name: str
    size_in: int
    size_out: int
    order: tuple[int, ...] = ()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.size_out, self.size_in)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        rows, columns = _within(index[1], self.size_out), _within(index[0], self.size_in)
        if _length(rows) and _length(columns):
            values = files.read(self.name, (rows, columns))
            if self.order:
                assert _length(rows) == self.size_out, "rows in another order are read together"
                values = values[list(self.order)]
            _turn(values, out[: _length(columns), : _length(rows)])


@dataclass(frozen=True)
class GateUp:
    """[in, 2, out] from two tensors [out, in]."""

    gate: Turned
    up: Turned

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self.gate.expected()
        yield from self.up.expected()

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        assert index[1] == slice(0, 2), index
        for i, half in enumerate((self.gate, self.up)):
            half.fill(files, (index[0], index[2]), out[:, i])


@dataclass(frozen=True)
class Heads:
    """How query heads lie in rows of a tensor: heads of one kv head after each other."""

    kv_heads: int
    group: int
    head_dim: int
    replicas: int
    stored_group: int

    def queries(self, stored: int) -> slice:
        """Rows of the query heads of a stored kv head; fewer than stored_group in the last copy."""
        head, copy = divmod(stored, self.replicas)
        first = min(copy * self.stored_group, self.group)
        last = min(first + self.stored_group, self.group)
        at = head * self.group
        return slice((at + first) * self.head_dim, (at + last) * self.head_dim)

    def dealt(self, part: slice) -> Iterator[tuple[int, slice]]:
        """Stored kv heads of a part that have queries: each one's place in it, and `queries`."""
        for i, stored in enumerate(range(part.start, part.stop)):
            rows = self.queries(stored)
            if _length(rows):
                yield i, rows

    def shared(self, stored: int) -> slice:
        """Rows of the key, or value, head behind a stored kv head."""
        head = stored // self.replicas
        return slice(head * self.head_dim, (head + 1) * self.head_dim)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value tensors."""
        kv = self.kv_heads * self.head_dim
        return kv * self.group, kv, kv


@dataclass(frozen=True)
class QKV:
    """[hidden, kv_heads, group + 2, head_dim], or a vector without the first axis.

    names: of queries, keys and values; "" where one is none, which stays zero. Of queries and keys
    alone it is [..., group + 1, head_dim].
    order: the row of a query's or key's head for each entry, where the orders differ.
    """

    names: tuple[str, ...]
    heads: Heads
    hidden: int | None
    order: tuple[int, ...] = ()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, size in zip(self.names, self.heads.sizes, strict=False):
            if name:
                yield name, (size,) if self.hidden is None else (size, self.hidden)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        first_axis = () if self.hidden is None else (slice(0, self.hidden),)
        stored_heads = index[len(first_axis)]
        group, head_dim = self.heads.stored_group, self.heads.head_dim
        for i, stored in enumerate(range(stored_heads.start, stored_heads.stop)):
            shared = self.heads.shared(stored)
            parts = (0, self.heads.queries(stored)), (group, shared), (group + 1, shared)
            for name, (at, rows) in zip(self.names, parts, strict=False):
                if not name or not _length(rows):
                    continue
                values = files.read(name, (rows, *first_axis))
                values = values.reshape(-1, head_dim, *values.shape[1:])
                if self.order and at <= group:
                    values = values[:, list(self.order)]
                for place, head in enumerate(values, at):
                    if self.hidden is None:
                        out[i, place] = head
                    else:
                        _turn(head, out[:, i, place])


@dataclass(frozen=True)
class Output:
    """[kv_heads, group, head_dim, hidden] from a tensor [hidden, query rows]."""

    name: str
    heads: Heads
    hidden: int

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.hidden, self.heads.sizes[0])

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        head_dim = self.heads.head_dim
        for i, columns in self.heads.dealt(index[0]):
            values = files.read(self.name, (slice(0, self.hidden), columns))
            to = out[i, : _length(columns) // head_dim]
            _turn(values, to.reshape(_length(columns), self.hidden))


@dataclass(frozen=True)
class Queries:
    """[in, kv_heads, group, head_dim] from a tensor [query rows, in].

    order: the row of a head for each entry, where the orders differ.
    """

    name: str
    heads: Heads
    size_in: int
    order: tuple[int, ...] = ()

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0], self.size_in)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        head_dim = self.heads.head_dim
        order = list(self.order) or slice(None)
        for i, rows in self.heads.dealt(index[1]):
            values = files.read(self.name, (rows, slice(0, self.size_in)))
            for place, head in enumerate(values.reshape(-1, head_dim, self.size_in)):
                _turn(head[order], out[:, i, place])


@dataclass(frozen=True)
class OutOfLatent:
    """A part of each head's projection of a latent vector: [kv_heads, group, part, rank].

    The tensor is [rows of all heads, rank]; `part` selects from a head's head_dim rows. turned:
    whether the last two axes are swapped.
    """

    name: str
    heads: Heads
    rank: int
    part: slice
    turned: bool

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0], self.rank)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        for i, rows in self.heads.dealt(index[0]):
            values = files.read(self.name, (rows, slice(0, self.rank)))
            values = values.reshape(-1, self.heads.head_dim, self.rank)[:, self.part]
            if self.turned:
                for place, head in enumerate(values):
                    _turn(head, out[i, place])
            else:
                out[i, : len(values)] = values


@dataclass(frozen=True)
class OfHeads:
    """[kv_heads, group] from a tensor [query heads]. heads: of head_dim 1."""

    name: str
    heads: Heads

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.heads.sizes[0],)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        for i, rows in self.heads.dealt(index[0]):
            out[i, : _length(rows)] = files.read(self.name, (rows,))


@dataclass(frozen=True)
class Interleaved:
    """[*lead, 2, size] from a tensor [*lead, 2 * size]: gates in even columns, ups in odd ones.

    The last axis may be padded.
    """

    name: str
    lead: tuple[int, ...]
    size: int

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (*self.lead, 2 * self.size)

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        assert index[-2] == slice(0, 2), index
        columns = _within(index[-1], self.size)
        if not _length(columns):
            return
        both = slice(2 * columns.start, 2 * columns.stop)
        for i, first in enumerate(range(index[0].start, index[0].stop)):
            # One expert at a time: all at once would take as much memory again as `out`.
            part = (slice(first, first + 1), *index[1:-2], both)
            pairs = files.read(self.name, part)[0].reshape(*out.shape[1:-2], _length(columns), 2)
            out[i, ..., : _length(columns)] = np.swapaxes(pairs, -1, -2)


@dataclass(frozen=True)
class OnFirst:
    """[experts, devices, size] from a tensor [experts, size]: on the first device, else zero."""

    name: str
    shape: tuple[int, int]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, self.shape

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        if index[1].start == 0:
            out[:, 0] = files.read(self.name, (index[0], index[2]))


@dataclass(frozen=True)
class Stack:
    """A leading axis of layers or experts, each from its own tensors."""

    parts: tuple[Source, ...]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in self.parts:
            yield from part.expected()

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        for i, part in enumerate(self.parts[index[0]]):
            # A one-dimensional part is still an array to write into.
            part.fill(files, index[1:], out[i])


# A source and where it goes: of each axis of a parameter all (None), a slice, or one place, which
# is no axis of the source.
Part = tuple[Source, tuple[slice | int | None, ...]]


@dataclass(frozen=True)
class Assembled:
    """A parameter of which each source fills a part. What is in no part is zero.

    Axes that are split over devices are left whole.
    """

    parts: tuple[Part, ...]

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for source, _ in self.parts:
            yield from source.expected()

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        for source, where in self.parts:
            own = tuple(
                whole if at is None else slice(0, _length(at))
                for whole, at in zip(index, where, strict=True)
                if not isinstance(at, int)
            )
            into = tuple(slice(None) if at is None else at for at in where)
            source.fill(files, own, out[into])


@dataclass(frozen=True)
class Scales:
    """Scales of codes, laid out as the codes, one for each group of inputs; see model/coded.py."""

    of: Source

    def expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return iter(())  # none beyond those of the codes

    def fill(self, files: Files, index: Index, out: np.ndarray) -> None:
        self.of.fill(files, index, out)


def fill(source: Source, files: Files, index: Index, out: np.ndarray) -> None:
    """Source.fill. Raises ModelError for a number that `out` cannot hold.

    Of the dtypes of parameters only float16 holds much less than those of tensors.
    """
    if out.dtype != np.float16:
        source.fill(files, index, out)
        return
    with np.errstate(over="ignore"):
        source.fill(files, index, out)
        if is_finite(out):
            return
        for name, shape in source.expected():
            if not is_finite(files.read(name, tuple(map(slice, shape))).astype(np.float16)):
                break
    most = f"{np.finfo(np.float16).max:,.0f}"
    raise ModelError(f"tensor {name}: has a number beyond {most}, the most that float16 holds")


def _within(part: slice, size: int) -> slice:
    return slice(min(part.start, size), min(part.stop, size))


def _length(part: slice) -> int:
    return part.stop - part.start


def _turn(values: np.ndarray, out: np.ndarray) -> None:
    """out[...] = values.T, some rows at a time: a plain strided copy is several times slower.

    The rows are copied apart by a line of the cache more than their length. That is often a power
    of two, and then the same columns of all rows would share a few lines.
    """
    rows, columns = values.shape
    bits = f"u{out.dtype.itemsize}"  # numpy is slower with dtypes that it does not know itself
    tile = np.empty((_TILE, columns + _LINE // out.dtype.itemsize), out.dtype)
    for at in range(0, rows, _TILE):
        part = values[at : at + _TILE]
        held = tile[: len(part), :columns]
        held[...] = part
        out[:, at : at + _TILE].view(bits)[...] = held.view(bits).T
