"""Real workers over several processes: a node that hangs is a pause, and all can leave."""

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster, up, wait_until
from tests.ports import free_port
from tests.serving.commands import MODEL, SMALL_PREFILL, Command, refused, start

NODES = ("--nnodes=2", "--tp-size=2")
FLAGS = (  # for decode three nodes of two devices and a rank each, for prefill two of one device
    "--context-length=128",
    "--page-size=16",
    "--kv-cache-dtype=fp8_e4m3",
    "--chunked-prefill-size=32",
    "--prefill-max-seqs-per-chunk=1",
    "--decode-max-running-requests=3",
    "--prefill-nnodes=2",
    "--prefill-tp-size=2",
    "--decode-nnodes=3",
    "--decode-dp-size=3",
    "--decode-tp-size=2",
    "--decode-speculative-algorithm=NGRAM",
)
SAMPLING = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 100, "ignore_eos": True}


def test_a_node_that_hangs_is_a_pause_and_all_of_its_group_come_back() -> None:
    prompts = [[5, 6, 7 + k] for k in range(3)]
    with up(f"--model-path={MODEL}", *FLAGS, few_steps=True) as cluster:
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(cluster.generate, p, **SAMPLING) for p in prompts]
            want = [answer.result(120)["output_ids"] for answer in answers]
        assert _num_links(cluster) == {"prefill": 3, "decode": 6}  # each node to each
        epoch = cluster.worker("decode")["epoch"]
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(cluster.generate, p, **SAMPLING) for p in prompts]
            wait_until(lambda: cluster.worker("decode")["load"]["running_requests"] == 3)
            os.kill(_other_node(cluster).pid, signal.SIGSTOP)
            assert [answer.result(120)["output_ids"] for answer in answers] == want
        workers = cluster.settled()
        assert [worker["compiles_after_ready"] for worker in workers] == [0] * len(workers)
        assert [worker["pages_held"] for worker in workers] == [0] * len(workers)
        assert max(w["epoch"] for w in workers if w["role"] == "decode") > epoch
        said = cluster.log.read_text()
        for node in ("decode-0", "decode-0.1", "decode-0.2"):  # that came back
            assert re.search(rf"^\[{node}\] .* loaded 1/", said, re.MULTILINE)


def _num_links(cluster: Cluster) -> dict[str, float]:
    """For prefill the addresses to which pages went, for decode the connections that they took."""
    return {
        "prefill": len(cluster.worker("prefill")["transfers"]),
        "decode": cluster.worker("decode")["counters"]["connections_shm"],
    }


def _other_node(cluster: Cluster) -> psutil.Process:
    """The decode worker's process that does not lead."""
    children = psutil.Process(cluster.process.pid).children()
    return next(child for child in children if {"decode", "--node-rank=1"} <= {*child.cmdline()})


def _start(
    commands: list[Command], folder: Path, port: int, rank: int, *more: str, **variables: str
) -> Command:
    command = start(
        folder,
        "prefill",
        f"--model-path={MODEL}",
        "--registry-address=127.0.0.1:1",  # nobody listens there
        *NODES,
        f"--node-rank={rank}",
        f"--dist-init-addr=127.0.0.1:{port}",
        *SMALL_PREFILL,
        *more,
        **variables,
    )
    commands.append(command)
    return command


def _said_at_its_end(command: Command, code: int) -> str:
    """The one line with which it ended."""
    assert command.ends() == code, command.text
    assert "Traceback" not in command.text
    return command.text.splitlines()[-1]


def test_a_node_that_was_started_differently_says_in_what_and_may_come_again(
    tmp_path: Path, commands: list[Command]
) -> None:
    port = free_port()
    leader = _start(commands, tmp_path, port, 0, "--max-total-tokens=512")
    differs = "--max-total-tokens differs: node 0 has 512, node 1 has 1024"
    other = _start(commands, tmp_path, port, 1, "--max-total-tokens=1024")
    assert _said_at_its_end(other, 2) == f"kvferry prefill: {differs}"
    leader.says(f"a node was refused: {differs}")
    _start(commands, tmp_path, port, 1, "--max-total-tokens=512")
    leader.says("loading weights")  # together


def test_a_group_that_serves_is_left_alone_by_whoever_comes_to_it(
    tmp_path: Path, commands: list[Command]
) -> None:
    """Proxies in the environment, where nothing listens, are not used for its meeting either."""
    port, proxies = free_port(), dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    nodes = [_start(commands, tmp_path, port, rank, **proxies) for rank in (0, 1)]
    nodes[1].says("node 1 of 2, led by .*, is ready")
    late = _start(commands, tmp_path, port, 1)
    stranger = _start(commands, tmp_path, port, 1, KVFERRY_CLUSTER_TOKEN="of another cluster")
    said = _said_at_its_end(late, 1)
    assert said == "kvferry prefill: node 1 is too late: this group has met already"
    assert _said_at_its_end(stranger, 2).endswith(": wrong or missing cluster token")
    # JAX would end them all within two seconds of meeting an extra node, or of losing one.
    again = _start(commands, tmp_path, port, 1, "--max-total-tokens=512")
    assert _said_at_its_end(again, 2).startswith("kvferry prefill: --max-total-tokens differs: ")
    assert [node.process.poll() for node in nodes] == [None, None]
    assert "proxy" not in "".join(node.text for node in nodes)  # JAX would warn of them
    nodes[0].signal(signal.SIGTERM)
    assert [node.ends() for node in nodes] == [0, 0]


def test_a_node_that_dies_before_all_are_ready_ends_the_group_in_a_line(
    tmp_path: Path, commands: list[Command]
) -> None:
    port = free_port()
    leader, other = (_start(commands, tmp_path, port, rank) for rank in (0, 1))
    leader.says("2 of 2 are here")
    other.signal(signal.SIGKILL)
    said = _said_at_its_end(leader, 1)
    assert said == "kvferry prefill: node 1 of this prefill group is lost"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_waits_for_others_can_be_told_to_leave(
    tmp_path: Path, commands: list[Command], number: signal.Signals
) -> None:
    nodes = [_start(commands, tmp_path, free_port(), rank) for rank in (0, 1)]  # never meet
    for node in nodes:
        node.says("joins 127.0.0.1")
        node.signal(number)
    for node in nodes:
        node.ends(10)
        assert "Traceback" not in node.text, node.text


def test_a_node_that_cannot_listen_where_others_look_for_it_says_so(
    tmp_path: Path, commands: list[Command]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(_start(commands, tmp_path, port, 0))
    assert said == (
        f"kvferry prefill: cannot listen on 127.0.0.1:{port}: Address already in use; choose "
        "another --dist-init-addr or --host"
    )
