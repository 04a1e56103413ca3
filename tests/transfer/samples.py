"""Small valid values shared by the tests of the transfer package."""

import importlib.util
from typing import Any

import msgspec
import numpy as np
import pytest

from model.config import PAGE_DTYPE_BYTES, KVSpec
from transfer import wire
from transfer.leases import Leases
from transfer.nixl_agent import PACKAGES
from transfer.rpc import Security

SECURITY = Security(token="token-of-the-tests")
PATIENCE_S = 20.0  # a test that waits longer has failed

NEEDS_NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(package) for package in PACKAGES),
    reason="no NIXL package is installed (requirements-nixl.lock)",
)

KV = KVSpec(num_layers=2, num_kv_heads=4, head_dim=8, page_size=4, dtype="bfloat16")


def a_worker(role: wire.Role = "decode", worker_id: str = "", **changes: Any) -> wire.WorkerInfo:
    """A worker of a small model. changes: fields of WorkerInfo."""
    info = wire.WorkerInfo(
        worker_id=worker_id or f"{role}-0",
        role=role,
        address="127.0.0.1:1",
        data_address="tcp://127.0.0.1:2" if role == "decode" else "",
        model_name="small",
        model_digest="d1",
        kv_spec=wire.KVSpecMessage(2, 4, 8, 4, "bfloat16"),
        tp_size=1,
        dp_size=1,
        context_length=512,
        max_request_tokens=512,
        stored_kv_heads=4,
    )
    return msgspec.structs.replace(info, **changes)


def a_grant(
    room: int,
    address: str,
    num_pages: int,
    epoch: int = 1,
    tp_size: int = 1,
    stored_kv_heads: int = KV.num_kv_heads,
) -> wire.Grant:
    return wire.Grant(
        room=room,
        epoch=epoch,
        data_addresses=(address,),
        page_ids=wire.pack_i32(np.arange(num_pages)),
        tp_size=tp_size,
        stored_kv_heads=stored_kv_heads,
    )


def logical_pages(num_pages: int, seed: int = 0, kv: KVSpec = KV) -> np.ndarray:
    """Random bits, u16 for bfloat16: [layers, planes, n, page_size, kv_heads, head_dim]."""
    shape = (kv.num_layers, kv.planes, num_pages, kv.page_size, kv.num_kv_heads, kv.head_dim)
    bits = bits_of(kv)
    return np.random.default_rng(seed).integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)


def bits_of(kv: KVSpec) -> Any:
    """The unsigned integer type of the same size as a value."""
    return {1: np.uint8, 2: np.uint16, 4: np.uint32}[PAGE_DTYPE_BYTES[kv.dtype]]


def sharded(pages: np.ndarray, stored_heads: int, shards: int, dtype: Any) -> list[np.ndarray]:
    """What each of `shards` shards stores of logical pages, heads repeated to stored_heads."""
    stored = np.repeat(pages, stored_heads // pages.shape[4], axis=4)
    return [np.ascontiguousarray(part).view(dtype) for part in np.split(stored, shards, axis=4)]


def names(leases: Leases) -> list[tuple[str, int]]:
    """Who is alive, by name, with its epoch."""
    return [(member.info.worker_id, member.epoch) for member in leases.view().members]
