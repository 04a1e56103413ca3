"""Pages of fp8 between processes: half the bytes, and numbers near those of whole pages."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.cluster import up

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "qwen3"
STEPS = 12


def test_a_system_with_fp8_pages_answers_alike_each_time_and_near_the_recorded() -> None:
    prompts = json.loads((GOLDEN / "golden.json").read_text())["prompts"]
    numbers = load_file(GOLDEN / "golden.safetensors")
    with up(
        f"--model-path={GOLDEN / 'model'}",
        "--prefill-kv-cache-dtype=fp8_e4m3",
        "--decode-kv-cache-dtype=fp8_e4m3",
        "--prefill-tp-size=2",
        "--disable-radix-cache",
        "--chunked-prefill-size=64",
        "--decode-max-running-requests=1",
    ) as cluster:
        for prompt in prompts:
            first, again = (
                cluster.generate(
                    prompt["ids"], max_new_tokens=STEPS, temperature=0, return_logprob=True
                )
                for _ in range(2)
            )
            assert first["output_ids"] == again["output_ids"]
            assert len(first["output_ids"]) == STEPS
            (logprob, token_id, _) = first["meta_info"]["output_token_logprobs"][0]
            logits = numbers[f"{prompt['name']}.logits"][-1].astype(np.float64)
            recorded = logits[token_id] - np.log(np.exp(logits).sum())
            assert abs(logprob - recorded) < 0.3, prompt["name"]
        for worker in cluster.settled():
            assert worker["config"]["kv_cache_dtype"] == "float8_e4m3fn"
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
