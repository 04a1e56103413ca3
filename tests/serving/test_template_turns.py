"""Long conversations wait in a bounded queue for their template, and leave with their clients."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from serving import conversation, protocol
from serving.tokenizer import Tokenizer
from tests.recording import until
from tests.serving.live import MODEL_PATH, Live, live_server

FOR_EVER = "for ever"
TEMPLATE = (
    "{% if messages[0].content == '" + FOR_EVER + "' %}"
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}"
    "{{ d.role }}{% endfor %}{% endfor %}{% endfor %}{% endfor %}{% endif %}a"
)


def _tokenizer(folder: Path) -> Tokenizer:
    shutil.copy(MODEL_PATH / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Tokenizer.from_dir(folder)


def _asked(content: str, count: int = 300) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] * count
    return {"messages": messages}


def _waiting(live: Live, count: int) -> bool:
    line = f"kvferry_num_queue_conversations {count}.0\n"
    return line in live.dispatcher.metrics.render().decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_who_leaves_makes_room_and_one_too_many_is_a_429(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_MAX_TEMPLATES_WAITING", 1)
    monkeypatch.setattr(conversation, "_MAX_RENDER_S", 600.0)
    tokenizer = _tokenizer(tmp_path)
    async with live_server(tokenizer=tokenizer) as live:
        taken = [asyncio.create_task(live.post(path, _asked(FOR_EVER))) for _ in range(2)]
        await until(lambda: _waiting(live, 1))
        refused = await live.post(path, _asked("Hi!"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        for properties, status in ((100, 200), (5000, 429)):  # each is a value that it may print
            parameters = {"properties": dict.fromkeys(map(str, range(properties)), True)}
            tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
            asked = _asked("Hi!", 1) | {"tools": [tool]}
            assert (await live.post(path, asked)).status_code == status
        for task in taken:
            task.cancel()
        await asyncio.wait(taken)
        await until(lambda: _waiting(live, 0))
        assert (await live.post(path, _asked("Hi!"))).status_code == 200
