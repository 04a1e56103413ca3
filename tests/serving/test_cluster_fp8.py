"""Pages and weights of one byte a number in separate processes: the same numbers, or near ones."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.cluster import up
from tests.model.harness import Golden, Harness
from tests.model.quantised_checkpoints import fp8_pair

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "qwen3"
STEPS = 12


def test_fp8_pages_and_int8_weights_answer_alike_each_time_and_near_the_recorded() -> None:
    prompts = json.loads((GOLDEN / "golden.json").read_text())["prompts"]
    numbers = load_file(GOLDEN / "golden.safetensors")
    with up(
        f"--model-path={GOLDEN / 'model'}",
        "--kv-cache-dtype=fp8_e4m3",
        "--prefill-quantization=int8",
        "--decode-quantization=int8",
        "--prefill-tp-size=2",
        "--disable-radix-cache",
        "--chunked-prefill-size=16",
        "--decode-max-running-requests=1",
        few_steps=True,
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
            assert worker["config"]["quantization"] == "int8"
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0


def test_weights_kept_as_codes_by_one_role_draw_what_both_would_without(tmp_path: Path) -> None:
    """The model has experts, latent attention and dense feed-forwards."""
    golden, path = Golden("deepseek_v3"), tmp_path / "fp8"
    shutil.copytree(
        golden.checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json")
    )
    _, plain = fp8_pair("deepseek_v3", path, tmp_path / "plain", (24, 16))
    prompts = list(golden.prompts.values())[:3]
    expected = [ran.ids for ran in Harness(plain).run(prompts, STEPS)]
    with up(
        f"--model-path={path}",
        "--prefill-quantization=none",
        "--decode-tp-size=2",
        "--decode-ep-size=2",
        "--chunked-prefill-size=16",
        "--decode-max-running-requests=1",
        few_steps=True,
    ) as cluster:
        for ids, wanted in zip(prompts, expected, strict=True):
            answer = cluster.generate(ids, max_new_tokens=STEPS, temperature=0)
            assert answer["output_ids"] == wanted
        for role, kept in (("prefill", "none"), ("decode", "fp8")):
            assert cluster.worker(role)["config"]["quantization"] == kept
        for worker in cluster.settled():
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
