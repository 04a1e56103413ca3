"""Which heads of which prefill shard go to which decode shard, and whether a pair can work at all.

Pure. Both sides shard pages over kv heads. A side with more shards than the model has kv heads
stores each head several times: stored head j of S holds logical head j * H // S.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transfer.errors import Incompatible
from transfer.wire import WorkerInfo

Nodes = Sequence[Sequence[int]]  # by rank of a worker: the node that has each of its shards


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Consecutive heads that travel together; starts count within a shard."""

    src_shard: int
    src_start: int
    dst_shard: int
    dst_start: int
    num_heads: int


def plan_heads(
    num_kv_heads: int, src_shards: int, src_stored: int, dst_shards: int, dst_stored: int
) -> tuple[HeadRun, ...]:
    """Cover every stored head of the destination exactly once, in runs as long as possible.

    num_kv_heads: of the model. *_stored: heads stored over all shards of a side. When several
    source shards hold a head, the destination's copies take turns among them. Raises Incompatible
    when the numbers do not divide.
    """
    for name, shards, stored in (
        ("prefill", src_shards, src_stored),
        ("decode", dst_shards, dst_stored),
    ):
        if stored % num_kv_heads or stored % shards:
            raise Incompatible(
                f"{name} stores {stored} kv heads in {shards} shards, the model has "
                f"{num_kv_heads}: the shards and the model's heads must each divide those stored"
            )
    src_local, dst_local = src_stored // src_shards, dst_stored // dst_shards
    src_copies, dst_copies = src_stored // num_kv_heads, dst_stored // num_kv_heads
    runs: list[HeadRun] = []
    for stored in range(dst_stored):
        logical, copy = divmod(stored, dst_copies)
        source = logical * src_copies + copy % src_copies
        run = HeadRun(*divmod(source, src_local), *divmod(stored, dst_local), num_heads=1)
        if runs and _joins(runs[-1], run):
            last = runs[-1]
            runs[-1] = HeadRun(
                last.src_shard,
                last.src_start,
                last.dst_shard,
                last.dst_start,
                last.num_heads + 1,
            )
        else:
            runs.append(run)
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class Part:
    """What one node of prefill sends to one address of decode, of each page."""

    address: str
    runs: tuple[HeadRun, ...]  # src_shard counts within the shards of that node
    num_senders: int  # nodes that send to the address


def plan_parts(
    runs: Sequence[HeadRun], src_nodes: Sequence[int], addresses: Sequence[str]
) -> dict[int, tuple[Part, ...]]:
    """By sending node, in order. Nodes that have nothing to send are left out.

    src_nodes: the node that has each source shard. addresses: where each destination shard is
    taken; or one, where all are. Raises Incompatible for any other number of addresses.
    """
    several, num_shards = len(addresses) > 1, max(run.dst_shard for run in runs) + 1
    if several and len(addresses) != num_shards:
        raise Incompatible(f"{len(addresses)} data addresses for {num_shards} shards of decode")
    by_pair: dict[tuple[int, str], list[HeadRun]] = {}
    for run in runs:
        node, address = src_nodes[run.src_shard], addresses[run.dst_shard if several else 0]
        local = replace(run, src_shard=list(src_nodes[: run.src_shard]).count(node))
        by_pair.setdefault((node, address), []).append(local)
    num_senders = Counter(address for _, address in by_pair)
    parts: dict[int, tuple[Part, ...]] = {}
    for (node, address), of_pair in sorted(by_pair.items(), key=lambda pair: pair[0][0]):
        part = Part(address, tuple(of_pair), num_senders[address])
        parts[node] = (*parts.get(node, ()), part)
    return parts


def _joins(last: HeadRun, run: HeadRun) -> bool:
    return (
        last.src_shard == run.src_shard
        and last.dst_shard == run.dst_shard
        and last.src_start + last.num_heads == run.src_start
        and last.dst_start + last.num_heads == run.dst_start
    )


def check_fit(new: WorkerInfo, old: WorkerInfo) -> None:
    """Raises Incompatible, naming the field and both values, unless both may be in one cluster."""
    if new.role == old.role:
        check_alike(new, old)
    else:
        check_pair(*((new, old) if new.role == "prefill" else (old, new)))


def check_alike(one: WorkerInfo, other: WorkerInfo) -> None:
    """Raises Incompatible, naming the first field of model and pages in which two workers differ.

    All workers of a cluster agree in these, whatever their roles.
    """
    pairs = [
        ("wire version", one.wire_version, other.wire_version),
        ("model digest", one.model_digest, other.model_digest),
        ("dtype", one.dtype, other.dtype),
        *(
            (f"kv {field}", getattr(one.kv_spec, field), getattr(other.kv_spec, field))
            for field in one.kv_spec.__struct_fields__
        ),
    ]
    _check_equal(one, other, pairs)


def check_pair(prefill: WorkerInfo, decode: WorkerInfo) -> None:
    """Raises Incompatible, naming the field and both values, if the pair cannot work together."""
    check_alike(prefill, decode)
    _check_backends(prefill, decode)
    plan_heads(
        prefill.kv_spec.num_kv_heads,
        prefill.tp_size,
        prefill.stored_kv_heads,
        decode.tp_size,
        decode.stored_kv_heads,
    )


def _check_backends(prefill: WorkerInfo, decode: WorkerInfo) -> None:
    """Raises Incompatible when one side requires a backend that the other does not have."""
    backends = (prefill.transfer_backend, decode.transfer_backend)
    if "nixl" in backends:
        pairs = [("transfer backend", prefill.transfer_backend, decode.transfer_backend)]
    elif "shm" in backends:
        left, right = ("tcp" if name == "tcp" else "shm" for name in backends)
        hosts = (prefill.host_identity, decode.host_identity)
        pairs = [
            ("transfer backend", left, right),
            ("host identity, with transfer backend shm,", *hosts),
        ]
    else:
        return
    _check_equal(prefill, decode, pairs)


def _check_equal(
    one: WorkerInfo, other: WorkerInfo, pairs: Sequence[tuple[str, object, object]]
) -> None:
    """Raises Incompatible for the first field whose values, one's and the other's, differ."""
    for field, left, right in pairs:
        if left != right:
            raise Incompatible(
                f"{field} differs: {one.worker_id} has {left}, {other.worker_id} has {right}"
            )
