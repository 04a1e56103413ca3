"""Routes beside generation, under the names that other servers have for them."""

import asyncio
import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.tokenizer import Tokenizer
from tests.recording import until
from tests.serving.live import EOS, MODEL_NAME, MODEL_PATH, live_server
from tests.serving.test_app import ASK, error_of, step_until_idle
from transfer import wire


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a", "messages": None}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": 1}),
    ],
)
async def test_an_invocation_is_answered_by_the_route_that_its_body_is_for(
    path: str, asked: dict[str, Any]
) -> None:
    """SageMaker calls no other path."""

    def told(answer: httpx.Response) -> tuple[int, str, Any]:
        first = json.loads(answer.text.partition("data: ")[2].partition("\n")[0] or answer.text)
        kind = first.get("object") or first.get("type") or first["error"]
        return answer.status_code, answer.headers["content-type"], kind

    async with live_server() as live:
        for stream in (False, True):
            fields = {**asked, "stream": stream}
            expected = told(await live.post(path, fields))
            assert told(await live.post("/invocations", fields)) == expected


async def test_all_that_name_the_model_agree() -> None:
    """SGLang's router takes the name from the one route, and its clients from another."""
    for given in ("", "a-name"):
        async with live_server(served_model_name=given) as live:
            models = (await live.http.get("/v1/models")).json()["data"]
            for path in ("/server_info", "/model_info"):
                told = (await live.http.get(path)).json()["served_model_name"]
                assert [told] == [model["id"] for model in models]


async def test_a_ping_is_answered_as_health_is() -> None:
    async with live_server() as live:
        for _ in range(2):
            health = await live.http.get("/health")
            for ping in (await live.http.get("/ping"), await live.post("/ping", {})):
                assert ping.status_code == health.status_code
                if health.status_code != 200:
                    assert error_of(ping) == error_of(health)
            await live.cluster.decode[0].kill(unlist=True)
            await until(lambda: not live.dispatcher.cluster_ready())
        assert health.status_code == 503


@pytest.mark.parametrize(
    ("prefills", "decodes", "missing"),
    [(0, 1, "prefill"), (1, 0, "decode"), (0, 0, "prefill and no decode")],
)
async def test_what_is_missing_before_the_first_pair_of_workers_is_named(
    prefills: int, decodes: int, missing: str
) -> None:
    async with live_server(prefills=prefills, decodes=decodes) as live:
        asked = {"prompt": "Hi!", "max_tokens": 1}
        for answer in (await live.http.get("/health"), await live.post("/v1/completions", asked)):
            assert answer.status_code == 503
            assert error_of(answer)["message"] == f"no {missing} worker takes work; try again"


async def test_the_tokenizer_is_told_of_where_it_is_asked_for() -> None:
    async with live_server() as live:
        response = await live.http.get("/tokenizer_info")
        assert response.status_code == 404
        assert error_of(response)["message"] == "there is no GET /tokenizer_info"
    config = json.loads((MODEL_PATH / "tokenizer_config.json").read_text())
    async with live_server(enable_tokenizer_info_endpoint=True) as live:
        info = (await live.http.get("/tokenizer_info")).json()
        assert info["added_tokens_decoder"]["1019"] == info["eos_token"] == "<|im_end|>"
        assert (info["bos_token"], info["pad_token"]) == (None, "<|endoftext|>")
        for name in ("chat_template", "tokenizer_class", "model_max_length"):
            assert info[name] == config[name]
        # A client that asks for ids, and renders chats, has what it needs.
        ids = (await live.post("/tokenize", {"prompt": info["eos_token"]})).json()["tokens"]
        assert ids == [EOS]
        assert (await live.post("/tokenizer_info", {})).status_code == 405


async def test_a_tokenizer_of_which_little_is_known_is_told_of(tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH / "tokenizer.json", tmp_path)
    said = {"model_max_length": 10**30, "vocab_file": "v.txt", "pad_token": {"content": "<p>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = Tokenizer.from_dir(tmp_path)
    async with live_server(tokenizer=tokenizer, enable_tokenizer_info_endpoint=True) as live:
        assert (await live.http.get("/tokenizer_info")).json() == {
            "model_max_length": 10**30,
            "eos_token": "<|im_end|>",  # from generation_config.json
            "bos_token": None,
            "pad_token": "<p>",
            "chat_template": "{{ messages }}",
            "tokenizer_class": "PreTrainedTokenizerFast",
        }


async def test_a_tokenizer_of_tiktoken_is_told_of_as_any_other() -> None:
    folder = MODEL_PATH.parents[1] / "tiktoken"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_dir(folder)
    async with live_server(tokenizer=tokenizer, enable_tokenizer_info_endpoint=True) as live:
        info = (await live.http.get("/tokenizer_info")).json()
        assert info["tokenizer_class"] == config["tokenizer_class"]
        assert info["eos_token"] == tokenizer.token_text(tokenizer.eos_id or 0)
        assert isinstance(info["chat_template"], str)


async def test_the_version_is_that_of_the_package() -> None:
    async with live_server() as live:
        response = await live.http.get("/version")
        assert response.json() == {"version": metadata.version("kvferry")}


async def test_models_are_listed_with_a_slash_behind_too() -> None:
    async with live_server() as live:
        response = await live.http.get("/v1/models/")
        assert response.json() == (await live.http.get("/v1/models")).json()
        assert response.json()["data"][0]["id"] == MODEL_NAME


async def test_the_load_is_what_runs_and_what_waits() -> None:
    async with live_server(auto_step=False, max_inflight_requests=2) as live:

        async def load() -> Any:
            return (await live.http.get("/load")).json()

        assert await load() == {"server_load": 0}
        first = asyncio.create_task(live.post("/v1/completions", {**ASK, "n": 2}))
        await live.cluster.submitted(2)
        second = asyncio.create_task(live.post("/v1/completions", ASK))
        await until(lambda: live.dispatcher.num_queued() == 1)
        assert await load() == {"server_load": 3}
        await live.post("/abort_request", {"abort_all": True})
        await asyncio.gather(first, second)
        await step_until_idle(live)
        assert await load() == {"server_load": 0}


async def test_a_cache_is_flushed_by_the_name_that_vllm_has_for_it() -> None:
    async with live_server() as live:
        asked = {**ASK, "prompt": list(range(20))}
        for expected in (0, 16):
            data = (await live.post("/v1/completions", asked)).json()
            assert data["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        response = await live.http.post("/reset_prefix_cache")
        assert (response.status_code, response.content) == (200, b"")
        data = (await live.post("/v1/completions", asked)).json()
        assert data["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await live.http.get("/reset_prefix_cache")).status_code == 405
        for worker in live.cluster.workers:
            await worker.kill(unlist=True)
        await until(lambda: not live.dispatcher.worker_ids())
        response = await live.http.post("/reset_prefix_cache")
        assert response.status_code == 400
        assert error_of(response)["code"] == "not_flushed"
        assert "no worker is available" in error_of(response)["message"]


async def test_loads_are_told_as_routers_of_sglang_read_them() -> None:
    async with live_server() as live:
        (prefill,), (decode,) = live.cluster.prefill, live.cluster.decode
        prefill.dp_size = 2
        ranks = tuple(
            wire.Load(
                running_requests=at, queued_requests=3, queued_tokens=40, pages_total=8,
                pages_free=2, slots_total=5,
            )
            for at in range(2)
        )  # fmt: skip
        prefill.ranks = ranks
        for worker in (prefill, decode):
            worker.announce()
        await until(lambda: live.dispatcher.dp_size("prefill") == 2)
        data = (await live.http.get("/v1/loads")).json()
        assert data["version"] == metadata.version("kvferry")
        assert data["timestamp"].endswith("+00:00")
        modes = [load["disaggregation"]["mode"] for load in data["loads"]]
        assert sorted(modes) == ["decode", "prefill", "prefill"]
        (member,) = (m for m in live.dispatcher.members() if m.info.role == "prefill")
        page_size = member.info.kv_spec.page_size
        found = (await live.http.get("/v1/loads", params={"dp_rank": "1"})).json()["loads"]
        assert found == [
            {
                "dp_rank": 1,
                "worker_id": member.info.worker_id,
                "num_running_reqs": 1,
                "num_waiting_reqs": 3,
                "num_used_tokens": 6 * page_size,
                "num_total_tokens": 6 * page_size + 40,
                "max_total_num_tokens": 8 * page_size,
                "token_usage": 0.75,
                "max_running_requests": 5,
                "disaggregation": {"mode": "prefill"},
            }
        ]
        for params in ({"dp_rank": "x"}, {"dp_rank": "-1"}, {"format": "prometheus"}):
            response = await live.http.get("/v1/loads", params=params)
            assert response.status_code == 400
            assert error_of(response)["param"] in params
