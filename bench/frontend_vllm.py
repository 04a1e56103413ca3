"""Runs vLLM's own front end under the benchmark, and plays the engine core that it talks to.

Runs in an environment that has vLLM. `-m bench.frontend_vllm serve NOTIFY_FD LIFELINE_FD MODEL
PORT`: HTTP server, AsyncLLM and its detokenizer as `vllm serve` runs them, at their defaults.
`-m bench.frontend_vllm engine FD`: sends it tokens, as its engine core would.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.frontend_peer_steps import main, tell_addresses
from bench.frontend_plan import HOST

_RANK = (0).to_bytes(2, "little")  # the identity of the only engine
_NAME = re.compile("chatcmpl-(.*)-.*")  # vLLM's name of a request, around the client's name
_ANSWERS = {"get_supported_tasks": ("generate",)}  # to calls that are no requests; else None


def serve(notify_fd: int, model_path: str, port: str) -> None:
    """Serve until killed."""
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    words = ["--model", model_path, "--host", HOST, "--port", port]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    folder = tempfile.mkdtemp()
    addresses = f"ipc://{folder}/from_server", f"ipc://{folder}/to_server"
    tell_addresses(notify_fd, *addresses)
    engine = dict(zip(("input_address", "output_address"), addresses, strict=True))
    listening = setup_server(args, reuse_port=False)
    uvloop.run(run_server_worker(*listening, args, client_config=engine))


class VllmMessages:
    """frontend_peer_steps.Messages of vLLM's engine core, by vLLM's own types and spelling."""

    def __init__(self, from_server: str, to_server: str) -> None:
        import vllm.v1.engine as types
        import zmq
        import zmq.asyncio
        from vllm.v1.metrics.stats import SchedulerStats
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

        self._types = types
        self._new_stats = SchedulerStats
        self._new_result = UtilityResult
        self._encoder = MsgpackEncoder()
        self._requests = MsgpackDecoder(types.EngineCoreRequest)
        self._calls = MsgpackDecoder()
        self._input = zmq.asyncio.Context().socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, _RANK)
        self._input.connect(from_server)
        self._output = zmq.Context().socket(zmq.PUSH)
        self._output.set_hwm(0)
        self._output.connect(to_server)
        self._ready = self._input.send(b"")  # nothing of its configuration has changed

    async def take(self) -> list[Any]:
        kinds = self._types.EngineCoreRequestType
        found: list[Any] = []
        while not found or await self._input.poll(0):
            kind, *frames = await self._input.recv_multipart()
            if kind == kinds.ADD.value:
                found.append(self._requests.decode(frames))
            elif kind == kinds.UTILITY.value:
                _, call_id, method, _ = self._calls.decode(frames)
                result = self._new_result(_ANSWERS.get(method))
                self._tell(utility_output=self._types.UtilityOutput(call_id, result=result))
        return found

    def name(self, request: Any) -> str:
        match = _NAME.fullmatch(request.request_id)
        assert match is not None, request.request_id
        return match[1]

    def send(self, requests: Sequence[Any], token_ids: Sequence[int], idx: int, last: bool) -> None:
        new, finish = self._types.EngineCoreOutput, self._types.FinishReason.LENGTH
        finish_reason = finish if last else None
        outputs = [
            new(request.request_id, [token_id], finish_reason=finish_reason)
            for request, token_id in zip(requests, token_ids, strict=True)
        ]
        self._tell(outputs=outputs, scheduler_stats=self._new_stats(num_running_reqs=len(requests)))

    def _tell(self, **values: Any) -> None:
        told = self._types.EngineCoreOutputs(**values)
        self._output.send_multipart(self._encoder.encode(told))


if __name__ == "__main__":
    main(serve, VllmMessages)
