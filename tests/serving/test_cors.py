"""Scripts of web pages may read answers, errors and streams where their origin is allowed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.cors import CORSMiddleware

from serving.cors import Cors
from tests.fakes import FakeCluster
from tests.serving.live import Live, letters, live_server
from tests.serving.processes import ASK, serving, step_until
from tests.serving.test_flags import parse_front
from transfer.errors import ConfigError

PAGE = "https://page.example"
FROM_PAGE = {"Origin": PAGE}
PREFLIGHT = {
    **FROM_PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
KEY = {"Authorization": "Bearer secret"}
STREAM = {"prompt": "Hi!", "max_tokens": 9, "stream": True}


async def test_a_preflight_needs_no_key_and_allows_what_is_to_be_sent() -> None:
    async with live_server(api_key="secret", allowed_origins=(PAGE,)) as live:
        for path in ("/v1/chat/completions", "/generate", "/v1/models"):
            response = await live.http.options(path, headers=PREFLIGHT)
            assert response.status_code == 200
            allowed = response.headers
            assert allowed["access-control-allow-origin"] == PAGE
            assert "POST" in allowed["access-control-allow-methods"]
            assert allowed["access-control-allow-headers"] == "authorization,content-type"
            assert "access-control-allow-credentials" not in allowed


async def test_answers_and_errors_of_every_kind_can_be_read_by_the_page() -> None:
    limits: dict[str, Any] = {"max_inflight_requests": 1, "max_queued_requests": 0}
    settings = {"api_key": "secret", "max_request_bytes": 1000, **limits}
    async with live_server(allowed_origins=(PAGE,), **settings) as live:
        asked: list[tuple[str, Any, dict[str, str], int]] = [
            ("/v1/completions", {"prompt": "Hi!"}, KEY, 200),
            ("/v1/completions", {"prompt": "Hi!", "top_p": 3}, KEY, 400),
            ("/v1/completions", {"prompt": "Hi!"}, {}, 401),
            ("/no/such/path", {}, KEY, 404),
            ("/v1/models", {}, KEY, 405),
            ("/generate", {"text": "x" * 1000}, KEY, 413),
        ]
        for path, body, headers, status in asked:
            response = await live.post(path, body, **headers, **FROM_PAGE)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in response.headers["access-control-expose-headers"]
            assert response.headers["x-request-id"]


async def test_a_full_queue_and_a_fault_can_be_read_by_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[str, Any] = {"max_inflight_requests": 1, "max_queued_requests": 0}
    async with live_server(auto_step=False, allowed_origins=(PAGE,), **limits) as live:
        asking = asyncio.create_task(live.post("/v1/completions", {"prompt": "Hi!"}))
        await live.cluster.submitted(1)
        response = await live.post("/v1/completions", {"prompt": "Hi!"}, **FROM_PAGE)
        assert response.status_code == 429
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "Retry-After" in response.headers["access-control-expose-headers"]
        await step_until(live.cluster, asking)
        monkeypatch.setattr(live.dispatcher, "was_ready", None)
        response = await live.post("/v1/completions", {"prompt": "Hi!"}, **FROM_PAGE)
        assert response.status_code == 500
        assert response.headers["access-control-allow-origin"] == PAGE


async def test_another_page_gets_no_permission_and_is_told_as_by_any_error() -> None:
    other = {"Origin": "https://other.example"}
    async with live_server(allowed_origins=(PAGE, "http://localhost:3000")) as live:
        trace = {"X-Request-Id": "trace-7"}
        response = await live.http.options("/generate", headers={**PREFLIGHT, **other, **trace})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "cors_refused"
        assert response.headers["x-request-id"] == "trace-7"
        assert "Origin" in response.headers["vary"]
        assert "access-control-allow-origin" not in response.headers
        response = await live.post("/v1/completions", {"prompt": "Hi!"}, **other)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_refused"
        assert "access-control-allow-origin" not in response.headers
        for allowed in (PAGE, "http://localhost:3000"):
            response = await live.http.options(
                "/generate", headers={**PREFLIGHT, "Origin": allowed}
            )
            assert response.headers["access-control-allow-origin"] == allowed


@pytest.mark.parametrize("origin", ["https://page.example", "http://127.0.0.1:8000", "null"])
async def test_a_page_that_nobody_named_has_no_effect_on_a_server_without_a_key(
    origin: str,
) -> None:
    """A text of any kind needs no preflight, and its answer is read by nobody."""
    plain = {"Origin": origin, "Content-Type": "text/plain"}
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    own = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "cors"}
    async with live_server() as live:
        for path in ("/v1/completions", "/abort_request", "/flush_cache", "/drain"):
            response = await live.http.post(path, headers=plain, content=b'{"abort_all": true}')
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
        assert (await live.http.get("/flush_cache", headers=image)).status_code == 403
        for headers in (link, own, {}):
            assert (await live.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await live.http.get("/health", headers=plain)).status_code == 200
    async with live_server(api_key="secret") as live:  # no page knows it
        assert (await live.http.get("/v1/models", headers=plain | KEY)).status_code == 200


async def test_a_star_allows_every_page() -> None:
    async with live_server(allowed_origins=("*",)) as live:
        response = await live.http.options("/generate", headers=PREFLIGHT)
        assert response.headers["access-control-allow-origin"] == "*"
        response = await live.post("/generate", {"text": "Hi!"}, **FROM_PAGE)
        assert response.headers["access-control-allow-origin"] == "*"


async def streamed(live: Live, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Headers and events of a streamed answer."""
    async with live.http.stream("POST", path, json=body, headers=FROM_PAGE) as response:
        assert response.status_code == 200
        data = [line async for line in response.aiter_lines() if line]
    assert data.pop() == "data: [DONE]"
    return response.headers, [json.loads(event.removeprefix("data: ")) for event in data]


async def test_of_a_stream_only_the_start_passes_the_middleware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[str] = []
    send = CORSMiddleware.send

    async def noted(self: CORSMiddleware, message: Any, *args: Any, **kwargs: Any) -> None:
        passed.append(message["type"])
        await send(self, message, *args, **kwargs)

    monkeypatch.setattr(CORSMiddleware, "send", noted)
    async with live_server(allowed_origins=(PAGE,)) as live:
        headers, events = await streamed(live, "/v1/completions", STREAM)
        assert headers["access-control-allow-origin"] == PAGE
        assert "".join(event["choices"][0]["text"] for event in events) == letters(9)
        params = {"max_new_tokens": 9}
        body = {"text": "Hi!", "sampling_params": params, "stream": True}
        headers, events = await streamed(live, "/generate", body)
        assert headers["access-control-allow-origin"] == PAGE
        assert events[-1]["text"] == letters(9)
    assert passed == ["http.response.start"] * 2


async def test_without_the_flag_there_is_no_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(Cors, "__init__", never)
    async with live_server(api_key="secret") as live:
        headers = PREFLIGHT | KEY
        assert (await live.http.options("/generate", headers=headers)).status_code == 405
        response = await live.post("/generate", {"text": "Hi!"}, **KEY, **FROM_PAGE)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert "vary" not in response.headers


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_process_of_a_server_has_the_list(workers: int, tmp_path: Path) -> None:
    flag = f"--allowed-origins={json.dumps([PAGE, 'http://localhost:3000'])}"
    more = () if workers == 1 else (f"--api-workers={workers}",)
    async with FakeCluster() as cluster, serving(cluster, tmp_path, flag, *more) as server:
        for process in range(workers):
            async with server.door(process) as http:
                response = await http.options("/v1/completions", headers=PREFLIGHT)
                assert response.headers["access-control-allow-origin"] == PAGE
                streaming = http.stream("POST", "/v1/completions", json=ASK, headers=FROM_PAGE)
                async with streaming as answer:
                    assert answer.headers["access-control-allow-origin"] == PAGE
                    last = [line async for line in answer.aiter_lines() if line][-1]
                    assert last == "data: [DONE]"


@pytest.mark.parametrize("wrong", ["https://a.example", "{}", "[1]", '"*"', ""])
def test_what_is_no_list_of_texts_is_refused(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_front(f"--allowed-origins={wrong}")
    assert "expected a JSON list of texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    ["", "page.example", "https://page.example/", "https://Page.example", "https://*.example/a"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins: expected"):
        parse_front(f"--allowed-origins={json.dumps([PAGE, wrong])}")


def test_origins_are_a_list_and_none_is_the_default() -> None:
    assert parse_front().allowed_origins == ()
    assert parse_front("--allowed-origins", "[]").allowed_origins == ()
    assert parse_front("--allowed-origins", '["*"]').allowed_origins == ("*",)
    origins = (PAGE, "http://[::1]:3000", "app://obsidian.md", "null")
    assert parse_front("--allowed-origins", json.dumps(origins)).allowed_origins == origins
