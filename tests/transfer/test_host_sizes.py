"""The host's memory for prefixes: promised before weights are loaded, where it is taken."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from model.config import KVSpec
from model.errors import MemoryShortage, ModelError
from model.opening import OpenedModel
from model.promises import Promises
from prefill.config import PrefillConfig
from transfer import host_sizes

KV = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, page_size=64, dtype="float32")
MIB = 1 << 20
NEAR = 16 * MIB  # what this process may take or give back meanwhile


@pytest.fixture
def promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Promises:
    """Those of this process alone, on a host that has 1000 MiB left."""
    made = Promises(tmp_path)
    monkeypatch.setattr(host_sizes, "PROMISES", made)
    monkeypatch.setattr(host_sizes, "available_bytes", lambda: 1000 * MIB)
    return made


def check(**fields: Any) -> None:
    opened = cast(OpenedModel, SimpleNamespace(kv=KV))
    fields = {"max_total_tokens": 64 * 800, "hicache_ratio": 2.0, **fields}  # 200 MiB
    config = PrefillConfig(Path("model"), "127.0.0.1:1", enable_hierarchical_cache=True, **fields)
    host_sizes.check_host(config, opened)


def said(folder: Path) -> int:
    """What this process has promised to become."""
    return int((folder / str(os.getpid())).read_text())


def test_what_is_known_to_be_kept_is_promised_at_once_and_stays_promised(
    promises: Promises, tmp_path: Path
) -> None:
    with promises.turn():
        promises.make(300 * MIB)  # for weights
    before = said(tmp_path)
    check()
    assert said(tmp_path) - before == pytest.approx(200 * MIB, abs=NEAR)
    with promises.turn():
        promises.make(300 * MIB)  # once the pool's size is known
    assert said(tmp_path) - before == pytest.approx(200 * MIB, abs=NEAR)


def test_beside_what_the_worker_itself_has_promised_there_must_be_room(promises: Promises) -> None:
    with promises.turn():
        promises.make(700 * MIB)
    check()
    check()  # what was promised for the same pages does not count
    with promises.turn():
        promises.make(900 * MIB)
    line = r"1600 pages take 200\.0 MiB of the host's memory, of which [0-9.]+ MiB are left"
    with pytest.raises(ModelError, match=line):
        check()


@pytest.mark.parametrize(("total", "kind"), [(1 << 40, MemoryShortage), (1200 * MIB, ModelError)])
def test_a_host_that_has_the_room_at_other_times_may_have_it_later(
    promises: Promises, monkeypatch: pytest.MonkeyPatch, total: int, kind: type[ModelError]
) -> None:
    monkeypatch.setattr(host_sizes, "total_bytes", lambda: total)
    with pytest.raises(ModelError) as refused:
        check(hicache_ratio=12.0)  # 1200 MiB, beside what this process has
    assert refused.type is kind


def test_each_node_needs_memory_for_its_own_shards(promises: Promises) -> None:
    with promises.turn():
        promises.make(850 * MIB)
    group = {"nnodes": 2, "dist_init_addr": "127.0.0.1:1"}
    for rank in (0, 1):
        check(**group, tp_size=2, node_rank=rank)  # half of each page
        check(**group, dp_size=2, hicache_ratio=1.0, node_rank=rank)  # half of the pages
    with pytest.raises(ModelError, match=r"1600 pages take 200\.0 MiB"):
        check(tp_size=2)


def test_no_page_at_all_is_refused_before_weights_are_loaded(promises: Promises) -> None:
    with pytest.raises(ModelError, match=r"keeps not one page of 0\.1 MiB .*; choose a larger"):
        check(max_total_tokens=64, hicache_ratio=0.5)
