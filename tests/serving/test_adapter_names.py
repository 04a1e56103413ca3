"""Names of adapters: as flags, as the model of a request, and where they are unknown."""

from typing import Any

import msgspec
import pytest

from model.config import ModelConfig
from serving.config import ServeConfig
from serving.demo import demo_model_path
from serving.errors import ApiError
from serving.model_names import adapter_of, name_of
from serving.openai_api import ChatReader, CompletionReader
from serving.openai_fields import read_chat, read_completion
from serving.protocol import ServedModel
from serving.sglang_api import GenerateReader, read_generate
from tests.fakes import FakeCluster, until
from tests.serving.live import tokenizer_of_tests
from transfer import wire
from transfer.errors import ConfigError
from transfer.flags import Parser, add_flags, argv_of, config_from
from transfer.prefix_cache import sharing_salt
from transfer.worker_config import WORKER_HELP, WorkerConfig

NEEDED = ["--model-path=m", "--registry-address=127.0.0.1:1"]


def served(adapters: tuple[str, ...] | None) -> ServedModel:
    path = demo_model_path()
    config = ServeConfig(registry_address="127.0.0.1:1", model_path=path, served_model_name="base")
    cfg = ModelConfig.from_dir(path)
    return ServedModel(tokenizer_of_tests(), config, cfg, lambda: 512, adapters=lambda: adapters)


def parsed(*argv: str) -> WorkerConfig:
    parser = Parser(prog="kvferry prefill")
    add_flags(parser, WorkerConfig, WORKER_HELP)
    return config_from(WorkerConfig, parser.parse_args([*NEEDED, *argv]))


def test_each_adapter_is_a_name_and_a_path() -> None:
    config = parsed("--lora-paths", "a=/x/a", "b=rel=ative", "--port=5")
    assert [(name, str(path)) for name, path in config.lora_paths] == [
        ("a", "/x/a"),
        ("b", "rel=ative"),
    ]
    assert config.port == 5
    assert parsed("--lora-paths", "a=/x/a", "--port=5", "--lora-paths=b=rel=ative") == config
    assert parsed(*[x for x in argv_of(config) if x not in NEEDED]) == config
    dashed = parsed("--lora-paths=--port=/a", "--lora-paths=-b=/b")
    assert parsed(*[x for x in argv_of(dashed) if x not in NEEDED]) == dashed
    assert parsed().lora_paths == ()
    assert str(config.lora_paths) == "(a=/x/a, b=rel=ative)"  # as the log and the API show it


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-paths", "a"], "expected NAME=PATH, got 'a'"),
        (["--lora-paths", "=x"], "expected NAME=PATH, got '=x'"),
        (["--lora-paths", "a="], "expected NAME=PATH, got 'a='"),
        (["--lora-paths", "a\n=x"], "expected NAME=PATH"),
        (["--lora-paths"], "expected at least one argument"),
        (["--enable-lora"], "did you mean --lora-paths?"),
        (["--lora-modules", "a=b"], "did you mean --lora-paths?"),
    ],
)
def test_what_is_no_adapter_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--lora-paths", "--enable-lora"])
def test_serve_says_who_takes_adapters(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="kvferry serve")
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "a=b"])
    said = f"unknown flag {flag}; prefill, decode and up take adapters, by --lora-paths"
    assert said in capsys.readouterr().err


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="--lora-paths must name each adapter once, got a, a"):
        parsed("--lora-paths", "a=x", "a=y")
    for own in (["--lora-paths", "m=x"], ["--served-model-name=base", "--lora-paths", "base=x"]):
        with pytest.raises(ConfigError, match=r"'(m|base)' is the model's own name"):
            parsed(*own)


async def test_an_adapter_with_the_name_that_serve_gives_the_model_is_not_listed() -> None:
    async with FakeCluster() as cluster:
        dispatcher = await cluster.dispatcher(served_model_name="base")
        for worker in (*cluster.prefill, *cluster.decode):
            info = msgspec.structs.replace(worker.info(), adapters=("sql", "base"))
            cluster.registry.set(wire.Member(info, worker.epoch, worker.load))
        await until(lambda: dispatcher.adapters() == ("sql",))


async def test_a_request_has_the_adapter_that_it_names() -> None:
    model = served(("sql", "legal"))
    chats = [{"role": "user", "content": "Hi"}]
    for name, adapter in (("sql", "sql"), ("base", ""), ("", ""), (None, "")):
        bodies: list[tuple[Any, Any, dict[str, Any]]] = [
            (CompletionReader, read_completion, {"prompt": "Hi", "model": name}),
            (ChatReader, read_chat, {"messages": chats, "model": name}),
            (GenerateReader, read_generate, {"text": "Hi", "lora_path": name}),
        ]
        for reader, read, body in bodies:
            request = await reader(read(msgspec.json.encode(body)), model).finish(None)
            assert request.adapter == adapter
            assert name_of(request, model) == (adapter or "base")


def test_an_unknown_name_is_told_with_those_there_are() -> None:
    with pytest.raises(ApiError) as unknown:
        adapter_of("mine", served(("sql",)))
    assert unknown.value.status == 404
    assert "model: the model 'mine' does not exist; this server has 'base', 'sql'" in str(
        unknown.value
    )


def test_before_any_worker_has_told_its_adapters_a_name_may_come_again() -> None:
    with pytest.raises(ApiError, match="no worker is there yet") as early:
        adapter_of("sql", served(None))
    assert early.value.status == 503
    assert adapter_of("base", served(None)) == ""


def test_no_choice_of_salts_makes_two_adapters_share_pages() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("", "a\0"), ("a", "\0"), ("ab", "c"), ("a", "bc")]
    assert len({sharing_salt(*pair) for pair in pairs}) == len(pairs)
