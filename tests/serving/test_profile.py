"""Profiles of workers while they serve: what clients are told, and what is written."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from decode.config import DecodeConfig
from tests.cluster import up, wait_until
from tests.recording import until
from tests.served import CROWD
from tests.serving.live import live_server
from tests.serving.test_app import error_of
from transfer.errors import ConfigError

REFUSED = "started without --profile-dir"


async def test_workers_with_a_folder_are_profiled_and_the_others_say_why_not() -> None:
    async with live_server() as live:
        [decode], [prefill] = live.cluster.decode, live.cluster.prefill
        decode.profile_dir = "/some/folder"
        for path in ("/start_profile", "/stop_profile"):
            response = await live.http.post(path)
            assert response.status_code == 200
            told = response.json()
            assert told["folders"] == {decode.worker_id: "/some/folder"}
            assert list(told["refusals"]) == [prefill.worker_id]
            assert not told["success"]
        prefill.profile_dir = "/another"
        assert (await live.http.post("/start_profile")).json() == {
            "success": True,
            "folders": {decode.worker_id: "/some/folder", prefill.worker_id: "/another"},
            "refusals": {},
        }


async def test_a_profile_that_no_worker_can_begin_is_a_400_with_every_reason() -> None:
    async with live_server() as live:
        for path, why in (
            ("/start_profile", f"no profile has begun. decode-0: {REFUSED}; prefill-0: {REFUSED}"),
            ("/stop_profile", "no profile was written. decode-0: no profile has begun; "),
        ):
            response = await live.http.post(path)
            assert (response.status_code, error_of(response)["code"]) == (400, "no_profile")
            assert error_of(response)["message"].startswith(why)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"output_dir": "/tmp"}, "output_dir"),
        ({"num_steps": 5}, "num_steps"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"activities": ["CPU", "GPU"], "num_steps": None, "profile_by_stage": False}, ""),
        ({"model": "a", "prompt": "what vLLM's benchmark sends", "max_tokens": 5}, ""),
    ],
)
async def test_fields_that_change_a_profile_are_refused_by_name(
    fields: dict[str, object], refused: str
) -> None:
    async with live_server() as live:
        for worker in (*live.cluster.decode, *live.cluster.prefill):
            worker.profile_dir = "/some/folder"
        response = await live.post("/start_profile", fields)
        if refused:
            assert error_of(response)["param"] == refused
            assert error_of(response)["code"] == "unsupported_parameter"
        assert response.status_code == (400 if refused else 200)
        assert any(worker.profiling for worker in live.cluster.decode) is not bool(refused)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"profile_dir": "/nowhere/at/all"}, "--profile-dir: /nowhere/at/all is not a folder"),
        ({"profile_timeout_s": 0.0}, "--profile-timeout must be above 0"),
        ({"profile_timeout_s": float("inf")}, "--profile-timeout must be at most"),
    ],
)
def test_flags_that_allow_no_profile_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DecodeConfig(Path("m"), "127.0.0.1:1", **flags)


async def test_no_profile_begins_where_nothing_is_served() -> None:
    async with live_server() as live:
        await live.cluster.decode[0].kill(unlist=True)
        await until(lambda: not live.dispatcher.cluster_ready())
        for path in ("/start_profile", "/stop_profile"):
            assert (await live.http.post(path)).status_code == 503


def test_requests_run_on_while_both_roles_are_profiled(tmp_path: Path) -> None:
    with up(f"--profile-dir={tmp_path}", *CROWD) as cluster:
        want = cluster.generate([5] * 40, max_new_tokens=40, temperature=0)["output_ids"]
        began = cluster.post("/start_profile", {})
        assert began["success"]
        assert len(began["folders"]) == 2
        stop, rounds = threading.Event(), list[bool]()

        def keep_asking() -> None:
            while not stop.is_set():
                found = cluster.generate([5] * 40, max_new_tokens=40, temperature=0)["output_ids"]
                rounds.append(found == want)

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            wait_until(lambda: len(rounds) >= 3)
            assert cluster.post("/stop_profile", {}) == began
        finally:
            stop.set()
            asking.join()
        assert all(rounds)
        for folder in began["folders"].values():
            [file] = Path(folder).rglob("*.xplane.pb")
            planes = ProfileData.from_file(str(file)).planes
            assert any(True for plane in planes for line in plane.lines for _ in line.events)
        cluster.settled()
        for worker in cluster.workers():
            assert worker["compiles_after_ready"] == 0


def test_a_system_that_is_stopped_amid_a_profile_leaves_as_ever(tmp_path: Path) -> None:
    with up(f"--profile-dir={tmp_path}", *CROWD) as cluster:
        assert cluster.post("/start_profile", {})["success"]
        cluster.generate([5] * 40, max_new_tokens=40, temperature=0)
