"""Runs a process of a worker of either role: the leader of its group, or another member."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.devices import prepare_devices
from model.processors import take_threads
from transfer import flags, open_threads
from transfer.collector import keep_what_started
from transfer.member import Member, Node, Tell
from transfer.role import RoleWorker
from transfer.rpc import Security, to_the_end
from transfer.worker_config import WorkerConfig


def run[C: WorkerConfig](
    config: C,
    security: Security,
    worker: type[RoleWorker[Any, C]],
    node: Callable[[C, Security, Tell], Node],
) -> None:
    """Run until it is told to stop. node: of a member that does not lead."""
    open_threads.check_room(open_threads.FOR_WORKER + config.own_devices)
    take_threads(config.cpu_threads, ModelConfig.from_dir(config.model_path).hidden_size)
    prepare_devices(config.own_devices, config.meeting_host)

    def on_ready(worker_id: str) -> None:
        keep_what_started()
        flags.announce(worker_id)

    if config.node_rank:
        build = partial(node, config, security)
        running = Member(config, worker.role, security, build).run(on_ready)
    else:
        running = worker(config, security).run(config.registry_address, on_ready)
    asyncio.run(to_the_end(running))
