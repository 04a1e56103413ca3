"""A real system without weights: processes of unlike meshes have one random network."""

import json
import re
import shutil
from pathlib import Path

from tests.cluster import up
from tests.serving.commands import MODEL


def test_a_folder_without_weights_answers_a_streamed_completion(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with up(
        f"--model-path={folder}",
        "--load-format=dummy",
        "--context-length=128",
        "--page-size=16",
        "--chunked-prefill-size=32",
        "--prefill-max-seqs-per-chunk=1",
        "--prefill-nnodes=2",
        "--prefill-tp-size=2",
        "--decode-max-running-requests=1",
        "--decode-local-prefill-tokens=20",
        "--decode-cpu-threads=3",
        few_steps=True,
    ) as cluster:
        body = {"model": cluster.model, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body |= {"prompt": [*range(40, 64)], "stream": True}
        body["stream_options"] = {"include_usage": True}
        with cluster.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 8
        # Decode computes the short prompt itself, two prefill processes the longer one.
        short = [*range(40, 56)]
        drawn = cluster.generate(short, max_new_tokens=12, temperature=0, ignore_eos=True)
        ids = drawn["output_ids"]
        longer = cluster.generate(short + ids[:8], max_new_tokens=4, temperature=0, ignore_eos=True)
        assert longer["output_ids"] == ids[8:]
        assert len({worker["role"] for worker in cluster.settled()}) == 2
        log = cluster.log.read_text()
        assert "weights are random" in log
        told = re.findall(r" worker_id=(decode|prefill)\S* .* cpu_threads=(\d+) ", log)
        assert sorted(told) == [("decode", "3"), ("prefill", "1")]  # default of a small network
