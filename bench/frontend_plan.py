"""What all processes of the front end benchmark share: cells, tokens, events, and how they talk.

Streams are numbered from zero and named by `request_id`. Token k of stream s is entry
(s + k) % n of a list of n tokens of five characters each, so that a token that is lost, doubled
or given to a neighbour changes the text.
"""

import json
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

HOST = "127.0.0.1"  # where all processes listen
CONTEXT_LENGTH = 4096  # of the model that engines stand in for
MOST_STREAMS = 4096  # at once: slots of the engine, and requests that a server admits
TOKEN_CHARS = 5
STEER = struct.Struct("<q")  # engine to client: tell me when you hold this many events
STEP = struct.Struct("<ii")  # engine to floor: token index, number of streams; then i32 each
REQUESTED = struct.Struct("<i")  # floor to engine: this stream was asked for


# When the next step leaves. saturated: when the client holds all events but the last ones of a
# quarter of the streams. paced: by the clock. backlog: at once, whatever the client has.
Drive = Literal["saturated", "paced", "backlog"]


@dataclass(frozen=True)
class Cell:
    """One measurement. step_s: seconds from step to step when paced."""

    num_streams: int
    output_tokens: int
    interval: int  # tokens per event after the first; 0: the server decides, so not saturated
    drive: Drive = "saturated"
    step_s: float = 0.0
    spacing_s: float = 0.0  # seconds from request to request

    def __post_init__(self) -> None:
        if self.drive == "saturated" and not self.interval:
            raise ValueError("no saturated cell without an interval: no event can be waited for")

    @property
    def name(self) -> str:
        """The cell's name in rows, before the design's."""
        step = f" {self.step_s * 1e3:g} ms" if self.drive == "paced" else ""
        return f"x{self.num_streams} {self.drive}{step}"

    def to_json(self) -> dict[str, Any]:
        """The inverse is Cell(**values)."""
        return asdict(self)


@dataclass(frozen=True)
class Dialect:
    """How a server is asked, and how it answers.

    id_field: the field of a request with its id. id_prefix: what answers put before that id.
    opening: the number of events before the first text.
    """

    path: str = "/v1/chat/completions"
    id_field: str = "rid"
    id_prefix: str = ""
    opening: int = 1

    @property
    def is_chat(self) -> bool:
        """Whether it is OpenAI's chat completions, whose streams end with [DONE]."""
        return self.path.endswith("/chat/completions")

    def to_json(self) -> dict[str, Any]:
        """The inverse is Dialect(**values)."""
        return asdict(self)


def request_id(stream: int) -> str:
    """The id of a stream's request. All have one length, so that events have."""
    return f"s-{stream:06d}"


def stream_of(name: str) -> int:
    """The stream of a request id. Raises ValueError for anything else."""
    return int(name.removeprefix("s-"))


def token_at(stream: int, token_idx: int, num_tokens: int) -> int:
    """The index in the list of tokens of token `token_idx` of a stream."""
    return (stream + token_idx) % num_tokens


def text_of(stream: int, start: int, end: int, texts: Sequence[str]) -> str:
    """The text of tokens start .. end - 1 of a stream."""
    return "".join(texts[token_at(stream, k, len(texts))] for k in range(start, end))


def pieces_of(num_tokens: int, interval: int) -> int:
    """Events with text after `num_tokens` tokens: the first at once, then one per full interval."""
    return 1 + (num_tokens - 1) // interval if num_tokens else 0


def tokens_of(model_path: Path) -> tuple[list[int], list[str]]:
    """(ids, texts) of the tokens that are five plain characters."""
    from serving.tokenizer import Tokenizer  # not in the environment of another project's server

    tokenizer = Tokenizer.from_dir(model_path)
    found = [(idx, tokenizer.token_text(idx)) for idx in range(tokenizer.vocab_size)]
    kept = [
        (idx, text)
        for idx, text in found
        if len(text) == TOKEN_CHARS and text.isascii() and text.strip().isalpha()
    ]
    if len(kept) < 2:
        raise ValueError(f"{model_path} has fewer than 2 tokens of {TOKEN_CHARS} characters")
    return [idx for idx, _ in kept], [text for _, text in kept]


# --- a process of the benchmark and the one that started it: a line of JSON each way --------------


def say(**values: Any) -> None:
    """Answer the process that started this one."""
    print(json.dumps(values), flush=True)


def told() -> dict[str, Any]:
    """The next request to this process; {} when there will be no more."""
    line = sys.stdin.readline()
    values: dict[str, Any] = json.loads(line) if line else {}
    return values


def inherited_socket(number: str) -> socket.socket:
    """One end of a pair whose other end another process of the benchmark has."""
    return socket.socket(fileno=int(number))
