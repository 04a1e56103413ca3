"""Weights that are NaN: a request that meets them fails by name, its neighbours do not notice."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import checkpoint
from model.config import ModelConfig
from model.orbax import save_orbax
from model.sharding import make_mesh
from model.transformer import Model
from tests.cluster import Cluster, up

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "llama"
PROMPTS = {p["name"]: p for p in json.loads((GOLDEN / "golden.json").read_text())["prompts"]}
SAID = "is not finite: no token can be drawn"


def damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden model; embeddings of p33's last token and p1's last recorded one are NaN.

    In Orbax form, converted without the check for finite weights: a worker refuses any other.
    """
    source, model = shutil.copytree(GOLDEN / "model", folder / "source"), folder / "model"
    tensors = load_file(source / "model.safetensors")
    table = np.array(tensors["model.embed_tokens.weight"])
    table[[PROMPTS["p33"]["ids"][-1], PROMPTS["p1"]["greedy_ids"][-1]]] = np.nan
    save_file(tensors | {"model.embed_tokens.weight": table}, source / "model.safetensors")
    monkeypatch.setattr(checkpoint, "is_finite", lambda _: True)
    made = Model.create(ModelConfig.from_dir(source), make_mesh(1, 1), "float32", 16)
    save_orbax(source, model, made)
    return model


def streamed(cluster: Cluster, name: str) -> list[dict]:
    body = {
        "input_ids": PROMPTS[name]["ids"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 48},
        "stream": True,
    }
    with cluster.http.stream("POST", "/generate", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_a_request_whose_logits_are_not_finite_fails_and_its_neighbours_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Decode computes p1 itself, so all its tokens come from decode, in order and before the
    # failure. A first token from prefill could be later than all of decode's.
    flags = ["--context-length=128", "--chunked-prefill-size=32"]
    flags += ["--decode-max-running-requests=8", "--decode-local-prefill-tokens=4"]
    with up(f"--model-path={damaged(tmp_path, monkeypatch)}", *flags, few_steps=True) as cluster:
        with ThreadPoolExecutor(8) as pool:
            healthy = [
                pool.submit(
                    cluster.generate, PROMPTS["p7"]["ids"], temperature=0, max_new_tokens=12
                )
                for _ in range(4)
            ]
            at_decode = pool.submit(streamed, cluster, "p1")
            sampling = {"temperature": 1.0, "max_new_tokens": 12}
            body = {"input_ids": PROMPTS["p33"]["ids"], "sampling_params": sampling}
            at_prefill = pool.submit(cluster.http.post, "/generate", json=body)
        for answer in healthy:
            assert answer.result()["output_ids"] == PROMPTS["p7"]["greedy_ids"][:12]

        refused = at_prefill.result()
        assert refused.status_code == 500
        assert SAID in refused.json()["error"]["message"]
        assert "prefill" in refused.json()["error"]["message"]

        *told, last = at_decode.result()
        assert told[-1]["output_ids"] == PROMPTS["p1"]["greedy_ids"]
        assert SAID in last["error"]["message"]
        assert "decode" in last["error"]["message"]

        for worker in cluster.settled():
            assert worker["pages_held"] == 0
            assert worker["counters"]["rooms_internal"] == 1
