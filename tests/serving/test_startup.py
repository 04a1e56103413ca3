"""A bad start is one line that names the thing, the value got and what would do; exit code 2."""

import dataclasses
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from safetensors import safe_open
from safetensors.numpy import save_file

from model.eplb import ExpertPolicy
from model.errors import ModelError
from serving import api
from tests.cluster import wait_until
from tests.model.harness import open_plainly
from tests.serving.commands import (
    END_TIMEOUT_S,
    GOLDENS,
    MODEL,
    SMALL,
    TOKEN,
    Command,
    copy_of,
    environment,
    refused,
    start,
    truncate,
)
from tests.transfer.children import ROOT
from transfer import flags
from transfer.bootstrap import RegistryClient
from transfer.clock import SYSTEM_CLOCK
from transfer.errors import ConfigError, Incompatible
from transfer.leases import Leases
from transfer.rpc import Security
from transfer.wire import KVSpecMessage, WorkerInfo

MIXTRAL = GOLDENS / "mixtral" / "model"
NOWHERE = "127.0.0.1:1"  # nobody listens there


# --- damaged checkpoints, in this process ----------------------------------------------------


def edit_json(name: str, **changes: Any) -> Callable[[Path], object]:
    """Change fields of a JSON file; None removes one."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / name).read_text()) | changes
        kept = {key: item for key, item in value.items() if item is not None}
        (folder / name).write_text(json.dumps(kept))

    return damage


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def edit_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the tensors of the one weights file."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        with safe_open(file, framework="np") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        change(tensors)
        save_file(tensors, file)

    return damage


NORM = "model.norm.weight"


def _shorten(tensors: dict[str, Any]) -> None:
    tensors[NORM] = tensors[NORM][:-1].copy()


@pytest.mark.parametrize(
    ("model", "damage", "message"),
    [
        (MODEL, truncate, "model.safetensors: not a whole safetensors file"),
        (MODEL, remove("model.safetensors"), "no model.safetensors and no model.safetensors.index"),
        (MODEL, edit_tensors(lambda t: t.pop(NORM)), f"tensor {NORM} is missing from"),
        (MODEL, edit_tensors(_shorten), f"tensor {NORM}: shape [63], expected [64]"),
        (
            MIXTRAL,
            remove("model-00002-of-00002.safetensors"),
            "model-00002-of-00002.safetensors: no such file, but model.safetensors.index.json",
        ),
        (MIXTRAL, write("model.safetensors.index.json", "{"), "not an index with a weight_map"),
        (MODEL, remove("config.json"), "config.json: no such file"),
        (MODEL, write("config.json", "{'a': 1}"), "config.json: not readable as JSON"),
        (MODEL, write("config.json", "[]"), "config.json: expected a JSON object, got list"),
        (
            MODEL,
            edit_json("config.json", architectures=["MambaForCausalLM"]),
            "architectures is 'MambaForCausalLM'; accepted: LlamaForCausalLM, ",
        ),
        (MODEL, edit_json("config.json", num_hidden_layers=None), "num_hidden_layers is missing"),
        (MODEL, edit_json("config.json", hidden_size="64"), "hidden_size is '64'; accepted: an"),
        (MODEL, edit_json("config.json", torch_dtype="int8"), "torch_dtype is 'int8'; accepted: "),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    model: Path, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = copy_of(model, tmp_path, damage)
    with pytest.raises(ModelError) as caught:
        open_plainly(folder, 16, 64, dtype="auto")
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": Path("Qwen/Qwen3-0.6B")}, "--model-path Qwen/Qwen3-0.6B is not a folder"),
        ({"page_size": 24}, "--page-size must be a power of two, got 24"),
        ({"page_size": 128}, "--page-size 128 does not divide the context length 64"),
        ({"context_length": 40}, "--page-size 16 does not divide the context length 40; give"),
        ({"context_length": 513}, "--context-length 513 is above the model's max_position_embedd"),
        ({"chunk_size": 40}, "--page-size 16 does not divide --chunked-prefill-size 40"),
        ({"tp_size": 16}, "--tp-size 16 needs 16 devices, this process sees 8 (cpu)"),
        ({"tp_size": 3}, "tp_size 3 and 2 kv heads: one must divide the other"),
        ({"path": MIXTRAL, "tp_size": 6, "ep_size": 3}, "ep_size 3 must divide 8 experts"),
        (
            {"path": MIXTRAL, "tp_size": 2, "ep_size": 2, "placing": ExpertPolicy(3)},
            "ep_size 2 must divide 8 + 3 redundant experts",
        ),
        (
            {"path": MIXTRAL, "tp_size": 2, "ep_size": 2, "placing": ExpertPolicy(10)},
            "10 redundant experts: 8 experts in 2 parts take at most 8",
        ),
        (
            {"tp_size": 2, "ep_size": 2, "placing": ExpertPolicy(2)},
            "2 redundant experts: Qwen3ForCausalLM has none",
        ),
        (
            {"tp_size": 2, "ep_size": 2, "placing": ExpertPolicy(enable_eplb=True)},
            "Qwen3ForCausalLM has no experts that could be placed",
        ),
        (
            {
                "path": MIXTRAL,
                "tp_size": 2,
                "ep_size": 2,
                "placing": ExpertPolicy(init_expert_location="nowhere.json"),
            },
            "--init-expert-location nowhere.json is no JSON file: ",
        ),
        ({"max_total_tokens": 48}, "--max-total-tokens gives 3 pages, one request of full context"),
        ({"max_total_tokens": 1 << 50}, "do not fit in"),
        ({"fraction": 1e-9}, "too little memory: weights "),
        ({"fraction": 1.5}, "--mem-fraction-static must be in (0, 1], got 1.5"),
    ],
)
def test_what_does_not_fit_is_told_before_weights_are_read(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **more: Any) -> None:
        raise AssertionError("read the weights")

    monkeypatch.setattr("model.opening.load_params", load)
    given: dict[str, Any] = {"path": MODEL, "page_size": 16, "context_length": 64}
    with pytest.raises(ModelError) as caught:
        open_plainly(**(given | values))
    assert message in str(caught.value)


def test_a_context_that_pages_do_not_tile_is_rounded_down_unless_asked_for(tmp_path: Path) -> None:
    folder = copy_of(MODEL, tmp_path, edit_json("config.json", max_position_embeddings=500))
    opened = open_plainly(folder, 16, 0, dtype="auto")
    assert opened.context_length == 496


def test_a_platform_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found() -> str:
        raise AssertionError  # as JAX does where the plugin is missing

    monkeypatch.setattr("jax.default_backend", none_found)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ModelError, match="JAX finds no device, JAX_PLATFORMS is 'cuda'"):
        open_plainly(MODEL, 16, 64, dtype="auto")


# --- the API process, in this process --------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("tokenizer.json"), "cannot read {}/tokenizer.json: "),
        (write("tokenizer.json", "{}"), "{}/tokenizer.json is no tokenizer: "),
        (write("tokenizer_config.json", "no"), "{}/tokenizer_config.json is no JSON: "),
        (write("tokenizer_config.json", "9" * 5000), "{}/tokenizer_config.json is no JSON: "),
        (
            edit_json("tokenizer_config.json", additional_special_tokens=5),
            "{}/tokenizer_config.json: additional_special_tokens is 5; accepted: a list of tokens",
        ),
        (remove("config.json"), "{}/config.json: no such file"),
        (write("chat_template.jinja", "{% if %}"), "{}/chat_template.jinja: "),
        (
            write("generation_config.json", '{"min_p": "low"}'),
            "{}/generation_config.json: min_p is 'low'; accepted: a number",
        ),
        (
            edit_json("generation_config.json", eos_token_id=list(range(17))),
            "{}: 18 tokens end a text (eos_token_id); accepted: at most 16",
        ),
        (
            write("generation_config.json", '{"repetition_penalty": 0}'),
            "{}/generation_config.json: repetition_penalty: must be at least 0.01, got 0",
        ),
    ],
)
def test_the_api_refuses_what_it_cannot_read(
    damage: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(flags.TOKEN_ENV, TOKEN)
    folder = copy_of(MODEL, tmp_path, damage)
    argv = [f"--model-path={folder}", f"--registry-address={NOWHERE}", "--port=0"]
    with pytest.raises((ConfigError, ModelError)) as caught:
        api.main(argv)
    assert message.format(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own_signals")
def test_a_server_that_cannot_serve_never_says_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        raise OSError("no more sockets")

    def notify_ready(**facts: Any) -> None:
        raise AssertionError("said ready")

    monkeypatch.setenv(flags.TOKEN_ENV, TOKEN)
    monkeypatch.setattr(uvicorn.Server, "startup", fail)
    monkeypatch.setattr(flags, "notify_ready", notify_ready)
    with pytest.raises(OSError, match="no more sockets"):
        api.main([f"--model-path={MODEL}", f"--registry-address={NOWHERE}", "--port=0"])


# --- workers that do not fit together --------------------------------------------------------


def worker(role: Any, **changes: Any) -> WorkerInfo:
    kv = KVSpecMessage(num_layers=3, num_kv_heads=2, head_dim=32, page_size=16, dtype="float32")
    info = WorkerInfo(
        worker_id=f"{role}-1",
        role=role,
        address="127.0.0.1:1",
        data_address="tcp://127.0.0.1:2",
        model_name="m",
        model_digest="0123",
        kv_spec=kv,
        tp_size=1,
        dp_size=1,
        context_length=64,
        max_request_tokens=64,
        stored_kv_heads=2,
    )
    spec = {name: changes.pop(name) for name in list(changes) if hasattr(kv, name)}
    fields = {name: getattr(info, name) for name in info.__struct_fields__} | changes
    kv_fields = {name: getattr(kv, name) for name in kv.__struct_fields__} | spec
    return WorkerInfo(**(fields | {"kv_spec": KVSpecMessage(**kv_fields)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "4567"}, "model digest differs: prefill-1 has 0123, decode-1 has 4567"),
        ({"page_size": 32}, "kv page_size differs: prefill-1 has 16, decode-1 has 32"),
        ({"dtype": "bfloat16"}, "kv dtype differs: prefill-1 has float32, decode-1 has bfloat16"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_with_both_values(
    changes: dict[str, Any], message: str
) -> None:
    leases = Leases(ttl_s=3.0)
    leases.register(worker("prefill"), 1, 0.0)
    with pytest.raises(Incompatible) as caught:
        leases.register(worker("decode", **changes), 1, 0.0)
    assert message in str(caught.value)


def test_two_of_a_role_that_differ_hear_which_part_of_the_pages_does() -> None:
    leases = Leases(ttl_s=3.0)
    leases.register(worker("decode"), 1, 0.0)
    with pytest.raises(Incompatible) as caught:
        leases.register(worker("decode", worker_id="decode-2", page_size=32), 1, 0.0)
    assert str(caught.value) == "kv page_size differs: decode-2 has 32, decode-1 has 16"


@pytest.mark.parametrize(
    "address",
    ["", "registry", ":8998", "host:", "host:http", "host:0", "host:²", "http://host:8998"],
)
def test_an_address_without_host_or_port_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flags.TOKEN_ENV, TOKEN)
    refusal = re.escape("--registry-address must be host:port, or [host]:port for IPv6, got ")
    with pytest.raises(ConfigError, match=refusal):
        RegistryClient(address, Security(TOKEN), SYSTEM_CLOCK)
    with pytest.raises(ConfigError, match=refusal):
        api.main([f"--model-path={MODEL}", f"--registry-address={address}", "--port=0"])


# --- real commands ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A command that must refuse to start. {port} is one in use, {folder} an empty folder."""

    words: str
    line: str
    token: str = TOKEN


WORKER = f"--model-path {MODEL} --registry-address {NOWHERE} {' '.join(SMALL)}"
CASES = {
    "unknown command": Case("srve", "kvferry: unknown command 'srve'; it takes up, prefill, "),
    "the tests": Case(
        "test -q", "kvferry: the tests are in a clone, where ./kvferry test runs them"
    ),
    "misspelt flag": Case("up --prefil-tp-size 2", "unknown flag --prefil-tp-size; did you mean"),
    "short token": Case("registry", "kvferry registry: a cluster token of at least", token="abc"),
    "no certificates": Case(
        "registry --tls-ca-file {folder}/a --tls-cert-file {folder}/b --tls-key-file {folder}/c",
        "kvferry registry: TLS: {folder}/a is not a file",
    ),
    "registry port": Case(
        "registry --disaggregation-bootstrap-port {port}",
        "kvferry registry: cannot listen on 127.0.0.1:{port}: Address already in use; choose "
        "another --disaggregation-bootstrap-port or --host",
    ),
    "HTTP port": Case(
        f"serve --model-path {MODEL} --registry-address {NOWHERE} --port {{port}}",
        "kvferry serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose another",
    ),
    "HTTP port of two": Case(
        f"serve --model-path {MODEL} --registry-address {NOWHERE} --api-workers 2 --port {{port}}",
        "kvferry serve: cannot listen on 127.0.0.1:{port}: Address already in use; choose another",
    ),
    "no socket": Case(
        f"serve --model-path {MODEL} --registry-address {NOWHERE} --api-workers 2 --uds {{folder}}",
        "kvferry serve: --uds {folder}: expected no file, or a socket, got another kind of file",
    ),
    "no template": Case(
        f"serve --model-path {MODEL} --registry-address {NOWHERE} --chat-template {{folder}}/t",
        "kvferry serve: cannot read {folder}/t: [Errno 2] No such file or directory",
    ),
    "no template of up": Case(
        f"up --model-path {MODEL} --chat-template {{folder}}/t --port 0",
        "kvferry up: cannot read {folder}/t: [Errno 2] No such file or directory",
    ),
    "two addresses": Case(
        f"serve --model-path {MODEL} --registry-address {NOWHERE} --uds a --port 8000",
        "kvferry serve: --uds and --port exclude each other: give one address",
    ),
    "socket of up": Case(
        f"up --model-path {MODEL} --uds {{folder}}",
        "kvferry up: --uds {folder}: expected no file, or a socket, got another kind of file",
    ),
    "two addresses of up": Case(
        f"up --model-path {MODEL} --uds a --host ::1",
        "kvferry up: --uds and --host exclude each other: give one address",
    ),
    "HTTP port of up": Case(
        f"up --model-path {MODEL} --port {{port}}",
        "kvferry up: cannot listen on 127.0.0.1:{port}: Address already in use; choose another",
    ),
    "no model": Case(
        "up --model-path {folder}/m",
        "kvferry up: --model-path {folder}/m is not a folder; it takes a checkpoint on this",
    ),
    "no group": Case("up --decode 0", "kvferry up: --decode must be 1 to 256, got 0"),
    "many groups": Case("up --prefill 257", "kvferry up: --prefill must be 1 to 256, got 257"),
    "no rank": Case(
        "up --decode-dp-size 0", "kvferry up: decode: --dp-size must be at least 1, got 0"
    ),
    "control port": Case(
        f"prefill {WORKER} --port {{port}}",
        "kvferry prefill: cannot listen on 127.0.0.1:{port}: Address already in use; choose "
        "another --port or --host",
    ),
    "data port": Case(
        f"decode {WORKER} --data-port {{port}}",
        "kvferry decode: cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
        "--data-port",
    ),
    "truncated weights": Case(
        f"decode --model-path {{cut}} --registry-address {NOWHERE}",
        "kvferry decode: {cut}/model.safetensors: not a whole safetensors file",
    ),
    "memory": Case(
        f"prefill {WORKER} --max-total-tokens 99999999999999",
        "kvferry prefill: too little memory: weights ",
    ),
    "memory of the host": Case(
        f"prefill {WORKER} --enable-hierarchical-cache --hicache-size 999999",
        "kvferry prefill: --enable-hierarchical-cache: ",
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Command, Any]]]:
    """Run every case, three at a time; its command, and what to fill its line with."""
    folder = tmp_path_factory.mktemp("starts")
    cut = copy_of(MODEL, folder, truncate)
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(3) as pool:
        names = {"port": taken.getsockname()[1], "folder": folder, "cut": cut}

        def run(case: Case) -> Command:
            words = case.words.format(**names).split()
            command = start(folder, *words, KVFERRY_CLUSTER_TOKEN=case.token)
            command.process.wait(120)
            return command

        commands = pool.map(run, CASES.values())
        yield {name: (command, names) for name, command in zip(CASES, commands, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_a_command_that_cannot_start_says_why_in_its_last_line_and_exits_with_2(
    name: str, said: dict[str, tuple[Command, Any]]
) -> None:
    command, names = said[name]
    line = refused(command)
    assert CASES[name].line.format(**names) in line
    # The check that fails comes first: nothing is loaded, let alone compiled, before it.
    assert "loading weights" not in command.text


@pytest.mark.usefixtures("heard_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_told_to_stop_while_its_modules_load_a_process_ends_well(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It has a handler by then: without one, the first process of a container ignores signals."""
    command = start(tmp_path, *f"decode {WORKER}".split())
    status = Path(f"/proc/{command.process.pid}/status")
    caught = 1 << (number - 1)

    def is_caught() -> bool:
        (mask,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        return bool(int(mask.split()[1], 16) & caught)

    wait_until(is_caught, END_TIMEOUT_S)
    command.signal(number)
    assert command.ends() == 0
    # On a busy machine it may have come further and logged what it chose, but never its end.
    assert [line for line in command.text.splitlines() if "[decode] I " not in line] == []


def test_the_version_and_help_of_the_command_itself(tmp_path: Path) -> None:
    version, usage, bare = (start(tmp_path, *words) for words in (["--version"], ["--help"], []))
    assert [version.ends(), usage.ends(), bare.ends()] == [0, 0, 2]
    assert version.text.startswith("kvferry 0.")
    assert usage.text == bare.text
    assert usage.text.startswith("usage: kvferry COMMAND [flags]\n")


@pytest.mark.skipif(
    not (ROOT / ".venv/stamp-requirements-dev.lock").exists(),
    reason="the clone was not set up by ./kvferry, which would do it now",
)
def test_a_clone_is_found_whatever_cd_would_find(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", f"{ROOT.name}/kvferry", "test", "--version"],
        cwd=ROOT.parent,
        env={**environment(), "CDPATH": f"{tmp_path}:{ROOT.parent}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pytest ")
