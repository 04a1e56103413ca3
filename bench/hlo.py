"""Counts what a program that XLA compiled would do, from its text: launches, waits, bytes.

A launch is an instruction that is a kernel in the scheduled program, or a call of a library. If a
fusion takes part of an operand by a slice or a gather, only that part counts as read; if it writes
into an operand, only what is new counts as written. A loop's body counts once for each turn if XLA
knows how many there are. Otherwise it counts once, and the host waits for the device before each
turn and after the last. The host also waits once at a conditional, of which the branch that moves
most bytes counts. A kernel of our own decides as it runs which parts of its operands it reads, so
it counts as a launch, but its bytes do not count.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

_BITS: Final = {"pred": 8, "bf16": 16, "f8e4m3fn": 8} | {
    f"{kind}{bits}": bits
    for kind, sizes in (("s", (4, 8, 16, 32, 64)), ("u", (4, 8, 16, 32, 64)), ("f", (16, 32, 64)))
    for bits in sizes
}
_SHAPE: Final = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\]")
_HEAD: Final = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE: Final = re.compile(r"^(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE: Final = re.compile(r'op_name="([^"]*)"')
_FREE: Final = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "fusion-done",
    "copy-done",
    "async-done",
}
_KERNEL: Final = 'custom_call_target="__gpu$xla.gpu.triton"'  # what Pallas lowers a kernel to
_PARTS: Final = {"slice", "dynamic-slice", "gather"}
# Instructions that write into their first operand, with the index of the operand that is written.
_NEW: Final = {"dynamic-update-slice": 1, "scatter": 2}
_BRANCHES: Final = re.compile(r"(?:true_computation|false_computation)=%([\w.\-]+)")
_LISTED: Final = re.compile(r"branch_computations=\{([^}]*)\}")


class Op(NamedTuple):
    """One instruction. shape, rest: the text before its kind and behind its operands."""

    name: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    def called(self, role: str) -> str:
        """The computation that it names as `role`."""
        found = re.search(rf"\b{role}=%([\w.\-]+)", self.rest)
        assert found is not None, f"{self.name} has no {role}"
        return found.group(1)

    @property
    def scope(self) -> str:
        """Its `op_name`: where it was in the program that was traced."""
        found = _SCOPE.search(self.rest)
        return found.group(1) if found else ""


@dataclass
class Work:
    """The work of running a program.

    kernels: the launches that are kernels of our own. num_bytes: read and written in memory or
    caches, except by those.
    """

    launches: int = 0
    kernels: int = 0
    waits: int = 0
    num_bytes: int = 0

    def add(self, other: "Work", times: int = 1) -> None:
        """Add other work, done `times` times."""
        self.launches += other.launches * times
        self.kernels += other.kernels * times
        self.waits += other.waits * times
        self.num_bytes += other.num_bytes * times


Computations = dict[str, dict[str, Op]]


def count(text: str) -> Work:
    """The work of a scheduled module. text: `jax.stages.Compiled.as_text()`.

    Raises ValueError if there is no entry computation.
    """
    return _work(*parse(text))


def parse(text: str) -> tuple[Computations, str]:
    """(computations by name, with instructions in order; the entry computation's name)."""
    found: Computations = {}
    entry, inside = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            inside = found[head.group(2)] = {}
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            inside = None
        elif inside is not None:
            op = _op(line.strip())
            if op is not None:
                inside[op.name] = op
    if not entry:
        raise ValueError("no entry computation: not the text of a compiled module")
    return found, entry


def size(shape: str) -> int:
    """Bytes of a shape, or of all parts of a tuple. An unknown type counts as 0."""
    bits = sum(
        _BITS.get(kind, 0) * prod(int(side) for side in sides.split(",") if side)
        for kind, sides in _SHAPE.findall(shape)
    )
    return bits // 8


def _op(line: str) -> Op | None:
    found = _LINE.match(line)
    if found is None:
        return None
    name, shape, kind, behind = found.groups()
    depth, end = 1, 0
    while depth and end < len(behind):
        depth += {"(": 1, ")": -1}.get(behind[end], 0)
        end += 1
    operands = tuple(_NAME.findall(behind[:end]))
    return Op(name, kind, shape, operands, behind[end:], line.startswith("ROOT "))


def _work(computations: Computations, name: str) -> Work:
    total = Work()
    for op in computations[name].values():
        if op.kind in _FREE:
            continue
        if op.kind == "while":
            known = _TRIPS.search(op.rest)
            total.add(_work(computations, op.called("body")), int(known.group(1)) if known else 1)
            if not known:  # the host then asks the device before the turn, and once more
                total.add(_work(computations, op.called("condition")), 2)
                total.waits += 2
        elif op.kind == "conditional":
            ways = [_work(computations, way) for way in _ways(op)]
            total.add(max(ways, key=lambda way: way.num_bytes))
            total.waits += 1
        else:
            total.launches += 1
            if op.kind == "custom-call" and _KERNEL in op.rest:
                total.kernels += 1
                continue
            total.num_bytes += _moved(computations, name, op)
    return total


def _ways(op: Op) -> list[str]:
    listed = _LISTED.search(op.rest)
    return _NAME.findall(listed.group(1)) if listed else _BRANCHES.findall(op.rest)


def _moved(computations: Computations, name: str, op: Op) -> int:
    if op.kind in ("fusion", "fusion-start"):
        return _fusion(computations[op.called("calls")])
    if op.kind in _PARTS:
        return 2 * size(op.shape)
    around = computations[name]
    return size(op.shape) + sum(size(around[at].shape) for at in op.operands if at in around)


def _fusion(ops: dict[str, Op]) -> int:
    users: dict[str, list[Op]] = {name: [] for name in ops}
    for op in ops.values():
        for operand in set(op.operands):
            users[operand].append(op)

    def read(name: str) -> int:
        whole, total = size(ops[name].shape), 0
        for user in users[name]:
            is_first = user.operands[0] == name
            if user.kind in _PARTS and is_first:
                total += size(user.shape)
            elif user.kind == "bitcast":
                total += read(user.name)
            elif not (user.kind in _NEW and is_first):
                return whole
        return min(total, whole)

    root = next(op for op in ops.values() if op.is_root)
    results = [ops[at] for at in root.operands] if root.kind == "tuple" else [root]
    inputs = sum(read(op.name) for op in ops.values() if op.kind == "parameter")
    return inputs + sum(_written(ops, op) for op in results)


def _written(ops: dict[str, Op], op: Op) -> int:
    while op.kind == "bitcast":
        op = ops[op.operands[0]]
    return size(ops[op.operands[_NEW[op.kind]]].shape if op.kind in _NEW else op.shape)
