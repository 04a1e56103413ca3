"""Leases of workers, at times that the test gives."""

from typing import Any

import msgspec
import pytest

from tests.transfer.samples import a_worker, names
from transfer import wire
from transfer.errors import Incompatible
from transfer.leases import Leases

TTL_S = 3.0


def a_beat(worker_id: str = "decode-0", epoch: int = 1, **load: int) -> wire.Heartbeat:
    return wire.Heartbeat(worker_id, epoch, wire.Load(**load))


def test_a_registered_worker_is_seen_until_its_lease_ends() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(), 1, now_s=10.0)
    assert names(leases) == [("decode-0", 1)]
    assert leases.expire(12.9) == ()
    assert leases.expire(13.1) == ("decode-0",)
    assert names(leases) == []


def test_a_heartbeat_prolongs_the_lease_and_brings_the_load() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(), 1, now_s=10.0)
    assert leases.heartbeat(a_beat(pages_free=5), now_s=12.0)
    assert leases.expire(14.9) == ()
    assert leases.view().members[0].load.pages_free == 5
    assert leases.expire(15.1) == ("decode-0",)


def test_a_heartbeat_of_nobody_or_of_another_life_is_not_known() -> None:
    leases = Leases(TTL_S)
    assert not leases.heartbeat(a_beat(), now_s=10.0)
    leases.register(a_worker(), 2, now_s=10.0)
    assert not leases.heartbeat(a_beat(epoch=1), now_s=10.0)
    assert not leases.heartbeat(a_beat(epoch=3), now_s=10.0)


def test_registering_again_replaces_and_never_adds() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(address="127.0.0.1:1"), 1, now_s=10.0)
    leases.register(a_worker(address="127.0.0.1:9"), 2, now_s=10.0)
    leases.register(a_worker(address="127.0.0.1:9"), 2, now_s=11.0)
    assert names(leases) == [("decode-0", 2)]
    assert leases.view().members[0].info.address == "127.0.0.1:9"


def test_saying_goodbye_ends_this_life_only() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(), 2, now_s=10.0)
    leases.deregister("decode-0", 1)
    leases.deregister("decode-9", 1)
    assert names(leases) == [("decode-0", 2)]
    leases.deregister("decode-0", 2)
    assert names(leases) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_digest": "d2"}, ("digest", "d1", "d2")),
        ({"dtype": "float16"}, ("dtype", "float16")),
        ({"wire_version": 99}, ("version", str(wire.WIRE_VERSION), "99")),
        (
            {"kv_spec": msgspec.structs.replace(a_worker().kv_spec, page_size=16)},
            ("page_size", "4", "16"),
        ),
        (
            {"kv_spec": msgspec.structs.replace(a_worker().kv_spec, planes=1)},
            ("planes", "1", "2"),
        ),
    ],
)
def test_a_worker_that_fits_nobody_here_is_refused_with_both_values(
    role: wire.Role, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker("decode"), 1, now_s=10.0)
    newcomer = msgspec.structs.replace(a_worker(role, "newcomer"), **changes)
    with pytest.raises(Incompatible) as caught:
        leases.register(newcomer, 1, now_s=10.0)
    assert all(word in str(caught.value) for word in named), str(caught.value)
    assert names(leases) == [("decode-0", 1)]


def test_a_worker_may_come_back_changed_when_nobody_else_minds() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(), 1, now_s=10.0)
    leases.register(a_worker(model_digest="d2"), 2, now_s=10.0)
    assert names(leases) == [("decode-0", 2)]


def test_the_revision_grows_with_membership_and_not_with_load() -> None:
    leases = Leases(TTL_S)
    seen = [leases.revision]

    def grew() -> bool:
        seen.append(leases.revision)
        return seen[-1] > seen[-2]

    leases.register(a_worker(), 1, now_s=10.0)
    assert grew()
    leases.register(a_worker(), 1, now_s=10.0)
    assert not grew()
    leases.heartbeat(a_beat(pages_free=4), now_s=10.0)
    assert not grew()
    leases.heartbeat(wire.Heartbeat("decode-0", 1, wire.Load(), draining=True), now_s=10.0)
    assert grew()
    leases.expire(20.0)
    assert grew()


def test_a_view_has_the_load_of_each_rank_as_the_worker_last_told_it() -> None:
    leases = Leases(TTL_S)
    leases.register(a_worker(), 1, now_s=10.0)
    ranks = (wire.Load(pages_free=3), wire.Load(pages_free=1))
    leases.heartbeat(wire.Heartbeat("decode-0", 1, wire.Load(pages_free=4), ranks=ranks), 10.0)
    (member,) = leases.view().members
    assert (member.load.pages_free, member.ranks) == (4, ranks)
