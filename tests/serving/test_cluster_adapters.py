"""Real workers with adapters: each request has its own, and what it says is what PEFT computes."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest
from safetensors.numpy import load_file

from tests.cluster import Cluster, up
from tests.model.harness import GOLDENS

LORA = GOLDENS / "lora"
STEPS = 12
COMMON = (
    f"--model-path={GOLDENS / 'llama' / 'model'}",
    "--served-model-name=base",
    "--context-length=128",
    "--lora-paths",
    f"all={LORA / 'llama_all'}",
    f"queries={LORA / 'llama_queries'}",
    "--chunked-prefill-size=32",
)


def recorded() -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    """A prompt and its continuation, by model and name of the prompt."""
    golden = json.loads((GOLDENS / "llama" / "golden.json").read_text())
    prompts = {p["name"]: p for p in golden["prompts"] if p["name"] in ("p7", "p33")}
    found = {("base", name): (p["ids"], p["greedy_ids"][:STEPS]) for name, p in prompts.items()}
    for adapter in ("all", "queries"):
        numbers = load_file(LORA / f"llama_{adapter}" / "golden.safetensors")
        for name, prompt in prompts.items():
            found[adapter, name] = prompt["ids"], numbers[f"{name}.greedy_ids"].tolist()
    return found


@pytest.mark.parametrize(
    "flags",
    [
        (
            "--prefill-max-seqs-per-chunk=2",
            "--prefill-tp-size=2",
            "--decode-dp-size=2",
            "--decode-nnodes=2",
            "--decode-max-running-requests=8",
            "--decode-speculative-algorithm=NGRAM",
        ),
        ("--colocated", "--decode-max-running-requests=4"),
    ],
)
def test_requests_side_by_side_have_the_adapters_that_they_name(flags: tuple[str, ...]) -> None:
    jobs = recorded()
    with up(*COMMON, *flags, few_steps=True) as cluster:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            _models_are_listed(client)
            # The second time, pages of the same prompt without and with other adapters are cached.
            for _ in range(2):
                with ThreadPoolExecutor(len(jobs)) as pool:
                    asked = [(model, ids) for (model, _), (ids, _) in jobs.items()]
                    got = list(pool.map(partial(_completed, client), *zip(*asked, strict=True)))
                assert got == [(model, ids) for (model, _), (_, ids) in jobs.items()]
        _generate_names_its_adapter(cluster, jobs)
        for worker in cluster.settled():
            assert worker["compiles_after_ready"] == 0
            assert worker["pages_held"] == 0
        if "--colocated" in flags:
            _every_route_names_it(cluster)
            # While no worker is there, the names of the last ones are known, and requests wait.
            cluster.children()["decode"].kill()
            body = {"prompt": "hi", "max_tokens": 2, "model": "all"}
            assert cluster.post("/v1/completions", body)["model"] == "all"


def _models_are_listed(client: openai.OpenAI) -> None:
    cards = {card.id: card.model_dump()["parent"] for card in client.models.list().data}
    assert cards == {"base": None, "all": "base", "queries": "base"}
    assert client.models.retrieve("queries").id == "queries"
    with pytest.raises(openai.NotFoundError, match="this server has 'base', 'all', 'queries'"):
        _completed(client, "nobody", [1, 2])


def _completed(client: openai.OpenAI, model: str, prompt: list[int]) -> tuple[str, list[int]]:
    """The model that answered, and its tokens."""
    more = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=STEPS, temperature=0, extra_body=more
    )
    return answer.model, answer.choices[0].model_dump()["token_ids"]


def _generate_names_its_adapter(cluster: Cluster, jobs: dict[Any, Any]) -> None:
    prompt, ids = jobs["queries", "p33"]
    sampling = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "lora_path": "queries"}
    assert cluster.post("/generate", body)["output_ids"] == ids
    batch = body | {"input_ids": [prompt, prompt], "lora_path": ["queries", "queries"]}
    assert [one["output_ids"] for one in cluster.post("/generate", batch)] == [ids, ids]
    mixed = cluster.http.post("/generate", json=batch | {"lora_path": ["queries", "all"]})
    assert mixed.status_code == 400
    assert "lora_path: must be the same for all prompts of a batch" in mixed.text


def _every_route_names_it(cluster: Cluster) -> None:
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/messages", message),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ):
        assert cluster.post(path, body | {"model": "all"})["model"] == "all", path
        assert cluster.post(path, body)["model"] == "base", path
