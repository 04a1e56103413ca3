"""Runs SGLang's own front end under the benchmark, and plays the scheduler that it talks to.

Runs in an environment that has SGLang. `-m bench.frontend_sglang serve NOTIFY_FD LIFELINE_FD MODEL
PORT`: HTTP server, TokenizerManager and DetokenizerManager as `sglang.launch_server` starts them,
at their defaults. `-m bench.frontend_sglang engine FD`: sends them tokens, as its scheduler would.
"""

import multiprocessing
import os
from array import array
from collections.abc import Sequence
from typing import Any

from bench.frontend_peer_steps import main, tell_addresses
from bench.frontend_plan import CONTEXT_LENGTH, HOST

_PROMPT_TAIL = 5  # last ids of a prompt, which SGLang's scheduler sends the detokenizer at first


def serve(notify_fd: int, model_path: str, port: str) -> None:
    """Serve until killed."""
    # Otherwise /health asks the engine for a token and waits a second for it.
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    def init(server_args: Any, port_args: Any) -> Any:
        addresses = (port_args.scheduler_input_ipc_name, port_args.detokenizer_ipc_name)
        tell_addresses(notify_fd, *addresses)
        return init_tokenizer_manager(server_args, port_args)

    words = ["--model-path", model_path, "--host", HOST, "--port", port]
    words += ["--device", "cpu", "--skip-server-warmup"]
    launch_server(
        prepare_server_args(words),
        init_tokenizer_manager_func=init,
        run_scheduler_process_func=stand_in,
    )


def stand_in(*args: Any) -> None:
    """Stands in for SGLang's scheduler process: ready at once, and lives as long as its parent."""
    facts = {"max_total_num_tokens": 1 << 20, "max_req_input_len": CONTEXT_LENGTH}
    args[-1].send({"status": "ready"} | facts)
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by the server"
    parent.join()


class SglangMessages:
    """frontend_peer_steps.Messages of SGLang's scheduler, by SGLang's own types and spelling."""

    def __init__(self, from_server: str, to_server: str) -> None:
        import zmq
        import zmq.asyncio
        from sglang.srt.managers import io_struct
        from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

        self._types = io_struct
        self._new_stats = SchedulerReqTimeStats.new_from_obj
        self._input = zmq.asyncio.Context().socket(zmq.PULL)
        self._input.connect(from_server)
        self._output = zmq.Context().socket(zmq.PUSH)
        self._output.set_hwm(0)
        self._output.connect(to_server)
        self._stats: dict[str, Any] = {}

    async def take(self) -> list[Any]:
        found: list[Any] = []
        while not found or await self._input.poll(0):
            request = await self._types.async_sock_recv(self._input)
            if isinstance(request, self._types.TokenizedGenerateReqInput):
                found.append(request)
        return found

    def name(self, request: Any) -> str:
        return str(request.rid)

    def send(self, requests: Sequence[Any], token_ids: Sequence[int], idx: int, last: bool) -> None:
        output = self._types.BatchTokenIDOutput
        step = [array("q", [token_id]) for token_id in token_ids]
        tails = [request.input_ids[-_PROMPT_TAIL:] for request in requests]
        finish = {"type": "length", "length": idx + 1} if last else None
        if not idx:
            self._stats |= {one.rid: self._new_stats(one.time_stats) for one in requests}

        def each(value: Any) -> list[Any]:
            return [value] * len(requests)

        # Fields that nobody asked for (logprobs, hidden states, ...) are None, as from a scheduler.
        told = dict.fromkeys(output.__struct_fields__) | {
            "rids": [request.rid for request in requests],
            "http_worker_ipcs": each(None),
            "finished_reasons": each(finish),
            "decoded_texts": each(""),
            "decode_ids": step if idx else [*map(array.__add__, tails, step)],
            "read_offsets": [*map(len, tails)],
            "output_ids": step,
            "skip_special_tokens": each(True),
            "spaces_between_special_tokens": each(True),
            "no_stop_trim": each(False),
            "prompt_tokens": [len(request.input_ids) for request in requests],
            "reasoning_tokens": each(0),
            "completion_tokens": each(idx + 1),
            "cached_tokens": each(0),
            "cached_tokens_details": each(None),
            "image_tokens": each(0),
            "audio_tokens": each(0),
            "video_tokens": each(0),
            "spec_verify_ct": [],
            "retraction_counts": each(0),
            "weight_versions": each(None),
            "dp_ranks": each(0),
            "time_stats": self._types.wrap_as_pickle([self._stats[one.rid] for one in requests]),
        }
        self._types.sock_send(self._output, output(**told))
        if last:
            self._stats = {}


if __name__ == "__main__":
    main(serve, SglangMessages)
