"""Several HTTP processes behind one address: one dies alone, and each answers for all."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from serving import api_parent
from serving.config import ServeConfig
from tests.fakes import SECURITY, FakeCluster, until
from tests.serving.commands import MODEL, TOKEN, copy_of, refused, start
from tests.serving.live import alphabet, letters
from tests.serving.processes import (
    Server,
    all_ready,
    begun_streams,
    cut_off,
    info_of,
    serving,
    step_until,
    stream,
)
from tests.serving.test_listening import leave_stale
from tests.serving.test_metrics import parsed
from transfer.errors import ConfigError

TWO = "--api-workers=2"
NOWHERE = "127.0.0.1:1"


async def samples(http: httpx.AsyncClient) -> dict[tuple, float]:
    """(name, label values in order of the labels' names...) -> value."""
    return parsed((await http.get("/metrics")).content)


def folders_of(server: Server) -> list[Path]:
    """The folders where a server's processes meet, which nobody else may enter."""
    folders = [
        Path(str(connection.laddr)).parent
        for child in psutil.Process(server.command.process.pid).children()
        for connection in child.net_connections("unix")
        if "/kvferry-" in str(connection.laddr)
    ]
    assert folders
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    return folders


async def stopped(server: Server, number: signal.Signals) -> None:
    """Stop it; it ends in order: exit code 0, no process, no folder."""
    folders = folders_of(server)
    assert await server.stop(number) == 0, server.command.text
    assert "Traceback" not in server.command.text, server.command.text
    assert not [folder for folder in folders if folder.exists()]


async def test_a_killed_process_takes_its_own_clients_only_and_comes_back(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, TWO) as server,
        server.door(0) as dying,
        server.door(1) as living,
    ):
        lost, kept = stream(dying), stream(living)
        await cluster.submitted(2)
        for _ in range(2):
            cluster.step()
        await until(lambda: bool(lost.events) and bool(kept.events))
        pids = await server.pids()

        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await lost.task
        # The worker that has its room frees it, though no step was made.
        await until(lambda: [len(worker.rooms) for worker in cluster.workers] == [0, 1])
        async with server.connection() as http:  # the process that is left serves meanwhile
            late = stream(http)
            await step_until(cluster, kept.task, late.task)
            assert (kept.text, late.text) == (letters(8), letters(8))

        told = "api-0 ended with code -9 (killed, as the kernel does where memory runs out): "
        await until(lambda: told in server.command.text)
        await all_ready(server)
        # It took no client before its links to the workers were open.
        told = server.command.text.partition("starting it again")[2]
        before, listens, _ = told.partition("HTTP server listens")
        assert listens
        assert before.count(" is open") == len(cluster.workers)
        async with server.door(0) as http:
            again = {state["process"]: state["pid"] for state in (await info_of(http))["processes"]}
            assert again[1] == pids[1]
            assert again[0] != pids[0]
            anew = stream(http)
            await step_until(cluster, anew.task)
            assert anew.text == letters(8)
            # The process that lived on finds it again by itself.
            while len((await info_of(living))["processes"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await stopped(server, signal.SIGTERM)


async def test_whichever_process_answers_speaks_for_all(tmp_path: Path) -> None:
    limits = ("--max-inflight-requests=3", "--max-queued-requests=1")
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, TWO, *limits, "--enable-tokenizer-info-endpoint") as server,
        server.door(0) as first,
        server.door(1) as second,
        server.door(1) as third,
        server.door(0) as asks_first,
        server.door(1) as asks_second,
    ):
        # Process 0 has two places and one to wait in, process 1 one place and none to wait in.
        mine, other = stream(first, rid="mine"), stream(second, rid="other")
        await cluster.submitted(2)
        cluster.step()
        await until(lambda: bool(mine.events) and bool(other.events))
        full = await third.post("/v1/completions", json={"prompt": "Hi!", "max_tokens": 1})
        assert full.status_code == 429
        for http in (asks_first, asks_second):
            info = await info_of(http)
            assert (info["running"], info["queued"]) == (2, 0)
            assert info["max_inflight_requests"] == 3
            assert (await http.get("/load")).json() == {"server_load": 2}
            assert (await http.get("/tokenizer_info")).json()["eos_token"] == "<|im_end|>"
            read = await samples(http)
            assert [read["kvferry_num_running_reqs", p] for p in "01"] == [1, 1]
            assert [read["kvferry_requests_rejected_total", p] for p in "01"] == [0, 1]
            assert [read["kvferry_prompt_tokens_total", p] for p in "01"] == [3, 3]
            assert [read["kvferry_sibling_silent_total", p] for p in "01"] == [0, 0]
            assert read["kvferry_time_to_first_token_seconds_bucket", "+Inf", "0"] == 1
            assert read["kvferry_pages_free", "decode", "decode-0"] == 256

        aborted = await asks_first.post("/abort_request", json={"rid": "other"})
        assert aborted.json()["aborted"] == 1
        await other.task
        assert other.finish_reason == "abort"
        aborted = await asks_second.post("/abort_request", json={"abort_all": True})
        assert aborted.json()["aborted"] == 1
        await mine.task
        assert mine.finish_reason == "abort"
        await until(lambda: not any(worker.rooms for worker in cluster.workers))
        await stopped(server, signal.SIGINT)


async def test_more_choices_than_one_process_serves_are_refused_by_the_field_that_asks_for_them(
    tmp_path: Path,
) -> None:
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO, "--max-inflight-requests=4") as server,
        server.door(0) as http,
    ):
        refused = await http.post("/v1/completions", json={"prompt": "Hi!", "n": 3})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "n"
        assert error["message"].endswith("in one request, at most 2 are served")
        await stopped(server, signal.SIGTERM)


async def test_a_request_that_waits_elsewhere_is_aborted_too(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, TWO, "--max-inflight-requests=2") as server,
        server.door(0) as first,
        server.door(0) as second,
        server.door(1) as asks,
    ):
        served = stream(first)
        await cluster.submitted(1)
        waiting = asyncio.create_task(
            second.post("/v1/completions", json={"prompt": "Hi!", "rid": "waits"})
        )
        while (await info_of(asks))["queued"] < 1:  # noqa: ASYNC110  (another process's state)
            await asyncio.sleep(0)
        aborted = await asks.post("/abort_request", json={"rid": "waits"})
        assert aborted.json()["aborted"] == 1
        assert (await waiting).json()["error"]["code"] == "aborted"
        await step_until(cluster, served.task)
        assert served.text == letters(8)


async def uncached(http: httpx.AsyncClient, request_id: str) -> int:
    """How many tokens of the same prompt the process expects its worker to compute."""
    ask = {"prompt": [5] * 60, "rid": request_id, "max_tokens": 1}
    assert (await http.post("/v1/completions", json=ask)).status_code == 200
    told = (await http.get(f"/requests/{request_id}/timeline")).json()
    (attempt,) = told["choices"][0]["attempts"]
    tokens: int = attempt["routing"]["uncached_tokens"]
    return tokens


async def test_a_process_routes_by_what_another_had_computed(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO, "--policy=cache_aware") as server,
        server.door(0) as first,
        server.door(1) as second,
    ):
        assert await uncached(first, "first") == 60
        await asyncio.sleep(1.0)  # it is told within a tenth of that
        assert await uncached(second, "second") < 60


async def test_no_process_routes_by_what_was_in_a_cache_that_another_had_flushed(
    tmp_path: Path,
) -> None:
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO, "--policy=cache_aware") as server,
        server.door(0) as flushes,
        server.door(1) as http,
    ):
        assert await uncached(http, "first") == 60
        assert await uncached(http, "second") < 60
        assert (await flushes.post("/flush_cache")).status_code == 200
        assert await uncached(http, "third") == 60


async def test_a_process_that_hangs_is_left_out_and_counted(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO) as server,
        server.door(0) as asks,
    ):
        pids = await server.pids()
        os.kill(pids[1], signal.SIGSTOP)
        try:
            read = await samples(asks)
            info = await info_of(asks)
            for _ in range(2):
                aborted = await asks.post("/abort_request", json={"rid": "nobody's"})
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert read["kvferry_sibling_silent_total", "0"] == 1
        assert ("kvferry_sibling_silent_total", "1") not in read
        assert [state["process"] for state in info["processes"]] == [0]
        assert aborted.json() == {"success": True, "aborted": 0}
        lines = server.command.text.splitlines()
        left_out = [line for line in lines if "another API process of this server is left" in line]
        assert len(left_out) == 1


async def test_told_to_stop_at_once_every_process_ends_its_streams(tmp_path: Path) -> None:
    async with (
        FakeCluster(network=alphabet, auto_step=False) as cluster,
        serving(cluster, tmp_path, TWO) as server,
        server.door(0) as first,
        server.door(1) as second,
    ):
        streams = await begun_streams(cluster, first, second)
        await stopped(server, signal.SIGINT)
        await cut_off(*streams)
        await until(lambda: not any(worker.num_streams for worker in cluster.workers))


async def test_a_killed_parent_takes_all_along_and_leaves_nothing(tmp_path: Path) -> None:
    async with FakeCluster() as cluster, serving(cluster, tmp_path, TWO) as server:
        folders = folders_of(server)
        assert await server.stop(signal.SIGKILL) == -signal.SIGKILL
        await until(lambda: not any(folder.exists() for folder in folders))


async def test_a_parent_that_is_killed_while_all_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = (f"--model-path={MODEL}", f"--registry-address={NOWHERE}", "--port=0", TWO)
    command = start(tmp_path, "serve", *words)
    try:
        await until(lambda: len(command.family()) == 3)
        command.signal(signal.SIGKILL)
        await asyncio.to_thread(command.ends, 20)
    finally:
        command.kill()
    await until(lambda: not [*tmp_path.glob("kvferry-*")])


async def test_told_to_stop_while_it_starts_it_stops(tmp_path: Path) -> None:
    words = (f"--model-path={MODEL}", f"--registry-address={NOWHERE}", "--port=0", TWO)
    command = start(tmp_path, "serve", *words)
    try:
        await until(lambda: len(command.family()) == 3)
        command.signal(signal.SIGTERM)
        assert await asyncio.to_thread(command.ends, 20) == 0, command.text
        assert "Traceback" not in command.text, command.text
    finally:
        command.kill()


async def test_processes_share_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    leave_stale(path)
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO, f"--uds={path}") as server,
    ):
        assert server.address == str(path)
        dying = (await server.info())["process"]
        os.kill((await server.pids())[dying], signal.SIGKILL)
        # The other process takes every connection, also those that came while both were there.
        async with server.connection() as http:
            read = stream(http)
            await read.task
            assert read.text == letters(8)
        await until(lambda: f"api-{dying} ended with code -9" in server.command.text)
        await all_ready(server)
        await stopped(server, signal.SIGTERM)
        assert not path.exists()


async def test_processes_meet_whatever_characters_the_path_of_their_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes the path for a part of a URI."""
    odd = tmp_path / "a b%20?#ü"
    odd.mkdir()
    monkeypatch.setenv("TMPDIR", str(odd))
    async with FakeCluster(network=alphabet) as cluster, serving(cluster, tmp_path, TWO) as server:
        assert sorted(await server.pids()) == [0, 1]
        assert len([*odd.glob("kvferry-*/[01]")]) == 2
        assert await server.stop() == 0, server.command.text
    assert not [*odd.iterdir()]


def test_a_host_without_a_folder_for_sockets_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.TemporaryDirectory", none)
    config = ServeConfig(MODEL, NOWHERE, port=0, api_workers=2)
    with pytest.raises(ConfigError, match=r"--api-workers .*\['/tmp'\]; set TMPDIR to a folder"):
        api_parent.run(config, SECURITY)


async def test_every_process_takes_the_template_that_was_given(tmp_path: Path) -> None:
    template = tmp_path / "given.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    ask = {"messages": [{"role": "user", "content": "Hi!"}, {"role": "user", "content": "Ho!"}]}
    async with (
        FakeCluster(network=alphabet) as cluster,
        serving(cluster, tmp_path, TWO, f"--chat-template={template}") as server,
    ):
        for process in (0, 1):
            async with server.door(process) as http:
                tokens = (await http.post("/tokenize", json=ask)).json()["tokens"]
                text = await http.post("/detokenize", json={"tokens": tokens})
                assert text.json()["text"] == "<Hi!><Ho!>"
                chat = await http.post("/v1/chat/completions", json=ask | {"max_tokens": 2})
                assert chat.json()["usage"]["prompt_tokens"] == len(tokens)


def test_a_process_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    model = copy_of(MODEL, tmp_path, lambda folder: (folder / "tokenizer.json").unlink())
    words = (f"--model-path={model}", f"--registry-address={NOWHERE}", "--port=0", TWO)
    line = refused(start(tmp_path, "serve", *words, KVFERRY_CLUSTER_TOKEN=TOKEN))
    assert line.startswith("kvferry serve: api-")
    assert f" ended with code 2 before it was ready: kvferry serve: cannot read {model}/" in line
