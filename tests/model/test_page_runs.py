"""Pages pass between pool and host unchanged, and take the memory that was planned."""

import weakref
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from model import page_runs
from model.config import FP8, KVSpec
from model.kv import abstract_pages, abstract_pool, init_pool
from model.page_runs import GatheredRuns, PlacedRuns, memory_pinner
from model.programs import CompileCounter, compile_all
from model.sharding import make_mesh

RUNS = (1, 4)
NUM_PAGES = 6


def _device_bytes(array: Any) -> int:
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape)) * array.dtype.itemsize


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_pages_placed_are_gathered_as_they_were_and_take_the_memory_that_was_planned(
    groups: int, dp_size: int, tp_size: int, dtype: str
) -> None:
    mesh = make_mesh(tp_size, 1, dp_size=dp_size)
    kv = KVSpec(2, num_kv_heads=2, head_dim=4, page_size=4, dtype=dtype, groups=groups)
    last = groups * NUM_PAGES - 1
    pool = init_pool(kv, NUM_PAGES, mesh)
    placing, gathering = PlacedRuns(kv, mesh, RUNS), GatheredRuns(kv, mesh, RUNS)
    shapes = abstract_pool(kv, NUM_PAGES, mesh)
    compile_all(placing.programs(shapes) + gathering.programs(shapes))
    placing.settle()

    placing.most_placing = sum(RUNS)
    planned = placing.spare_pages * dp_size * kv.page_bytes // mesh.size
    staged = sum(_device_bytes(abstract_pages(kv, count, mesh)) for count in RUNS)
    # Where ranks may have to join in with empty runs, those exist beside the runs that arrive.
    assert planned == staged * (2 if dp_size > 1 else 1)
    gathered = gathering.gather(pool, [[0]] * dp_size)
    assert dp_size * kv.page_bytes // mesh.size == _device_bytes(gathered)

    rng = np.random.default_rng(0)
    runs = {}
    for rank in range(dp_size):
        bits = rng.integers(0, 100, (tp_size, 2, 2, 3, 4, 2 // tp_size, 4), np.uint8)
        runs[rank] = [shard.astype(pool.dtype) for shard in bits]
        pages = [last - rank, 0, 1]
        pool = placing.place(pool, rank, pages, runs[rank])
    wanted = [[last - rank, 0, 1] for rank in range(dp_size)]
    found = gathering.shards(gathering.gather(pool, wanted), wanted)
    for rank, shards in runs.items():
        for shard, other in zip(shards, found[rank], strict=True):
            np.testing.assert_array_equal(np.asarray(other)[:, :, :3], shard)
    # The padding of a run to its program's length is written nowhere.
    for pages, of_rank in zip(wanted, np.split(np.asarray(pool), dp_size, axis=2), strict=True):
        assert not np.delete(of_rank, pages, axis=2).any()


def test_what_leaves_a_device_through_pinned_memory_is_found_there_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_runs, "_ON_THE_HOST", ())
    array = jax.device_put(np.arange(12, dtype=np.float32).reshape(3, 4), jax.devices()[1])
    counter = CompileCounter()
    counter.arm()
    try:
        pinned = page_runs.to_host(array)
        assert pinned.sharding.memory_kind == "pinned_host"
        found = np.asarray(pinned)
    finally:
        counter.disarm()
    assert counter.after_ready == 0
    assert found.ctypes.data == pinned.unsafe_buffer_pointer()
    np.testing.assert_array_equal(found, np.asarray(array))


def test_a_processor_reads_memory_that_is_not_pinned() -> None:
    assert memory_pinner(make_mesh(1, 1)) is None


class _Client:
    """Replaces jax's GPU client: records mapped addresses, and refuses once it has `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.mapped: dict[int, int] = {}

    def dma_map(self, address: int, size: int) -> None:
        if len(self.mapped) == self.most:
            raise RuntimeError("no more memory can be pinned")
        self.mapped[address] = size

    def dma_unmap(self, address: int) -> None:
        del self.mapped[address]


def test_memory_is_pinned_until_it_is_gone_or_said_to_be_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = _Client(most=1)
    gpu = SimpleNamespace(platform="gpu", client=client)
    monkeypatch.setattr(page_runs, "own_devices", lambda mesh: [gpu])
    pin = memory_pinner(make_mesh(1, 1))
    assert pin is not None
    first, second = np.zeros(4096, np.uint8), np.zeros(8192, np.uint8)
    pin(first)
    assert client.mapped == {first.ctypes.data: 4096}
    pin(second)
    pin(second)
    assert caplog.text.count("stays unpinned") == 1
    assert "no more memory can be pinned" in caplog.text
    del second
    assert len(client.mapped) == 1
    view = first[5:]
    gone = weakref.ref(first)
    del first
    assert gone() is not None
    assert len(client.mapped) == 1
    del view
    assert not client.mapped
