"""A tokenizer with tokens that its model lacks: texts with one are refused, others are served."""

from pathlib import Path
from typing import Any

import pytest

from serving.tokenizer import Tokenizer
from tests.serving.commands import copy_of
from tests.serving.live import MODEL_PATH, letters, live_server
from tests.serving.tokenizer_folders import set_config

STRANGE = "<|strange|>"
ASK = {"max_tokens": 3, "temperature": 0}


def with_strange_token(folder: Path) -> Tokenizer:
    """The model's tokenizer with one token more than the model has rows: 1024."""
    added = {"1024": {"content": STRANGE, "special": True}}
    copy = copy_of(MODEL_PATH, folder)
    return Tokenizer.from_dir(set_config(copy, added_tokens_decoder=added))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": f"Hi{STRANGE}!"}, "prompt"),
        ("/v1/completions", {"prompt": f"{'Hi! ' * 2000}{STRANGE}"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": STRANGE}]}, "messages"),
        ("/generate", {"text": STRANGE}, "text"),
        ("/tokenize", {"prompt": STRANGE}, "prompt"),
    ],
)
async def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    path: str, body: dict[str, Any], field: str, tmp_path: Path
) -> None:
    tokenizer = with_strange_token(tmp_path)
    async with live_server(tokenizer=tokenizer, context_length=8192) as live:
        refused = await live.post(path, body)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        told = f"'{STRANGE}' is token 1024, and the model has only those from 0 to 1023"
        assert message == f"{field}: {told}"
        served = await live.post("/v1/completions", {"prompt": "Hi!", **ASK})
        assert served.json()["choices"][0]["text"] == letters(3)


async def test_the_log_says_that_the_tokenizer_has_more_tokens_than_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_server(tokenizer=with_strange_token(tmp_path)):
        assert "token ids of the tokenizer go up to 1024, those of the model to 1023" in caplog.text
    caplog.clear()
    async with live_server():
        assert "token ids" not in caplog.text
