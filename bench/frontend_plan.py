"""What all processes of the front end benchmark agree on: cells, tokens, events, and how they talk.

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

TOKEN_CHARS = 5
STEER = struct.Struct("<q")  # engine to client: tell me when you hold so many events
STEP = struct.Struct("<ii")  # engine to floor: token index, number of streams; then i32 each
REQUESTED = struct.Struct("<i")  # floor to engine: this stream was asked for


# When the next step leaves. saturated: when the client holds all but a quarter of the last. paced:
# by the clock. backlog: at once, whatever the client has.
Drive = Literal["saturated", "paced", "backlog"]


@dataclass(frozen=True)
class Cell:
    """One measurement. step_s: seconds from step to step when paced."""

    num_streams: int
    output_tokens: int
    interval: int  # tokens an event after the first; 0: as the server likes, so not saturated
    drive: Drive = "saturated"
    step_s: float = 0.0
    spacing_s: float = 0.0  # seconds from request to request

    def __post_init__(self) -> None:
        if self.drive == "saturated" and not self.interval:
            raise ValueError("no saturated cell without an interval: no event can be waited for")

    @property
    def name(self) -> str:
        """As rows have it, before the design."""
        step = f" {self.step_s * 1e3:g} ms" if self.drive == "paced" else ""
        return f"x{self.num_streams} {self.drive}{step}"

    def to_json(self) -> dict[str, Any]:
        """The other way is Cell(**values)."""
        return asdict(self)


@dataclass(frozen=True)
class Dialect:
    """How a server is asked, and how it answers.

    id_field: of a request, with its id. id_prefix: what answers have before that id. opening:
    events before the first text.
    """

    path: str = "/v1/chat/completions"
    id_field: str = "rid"
    id_prefix: str = ""
    opening: int = 1

    @property
    def is_chat(self) -> bool:
        """Else it is OpenAI's Responses."""
        return self.path.endswith("/chat/completions")

    def to_json(self) -> dict[str, Any]:
        """The other way is Dialect(**values)."""
        return asdict(self)


def request_id(stream: int) -> str:
    """All of one length, so that events are."""
    return f"s-{stream:06d}"


def stream_of(name: str) -> int:
    """The stream of a request id. Raises ValueError for another name."""
    return int(name.removeprefix("s-"))


def token_at(stream: int, token_idx: int, num_tokens: int) -> int:
    """Which entry of the list of tokens it is."""
    return (stream + token_idx) % num_tokens


def text_of(stream: int, start: int, end: int, texts: Sequence[str]) -> str:
    """What tokens start .. end - 1 of a stream say."""
    return "".join(texts[token_at(stream, k, len(texts))] for k in range(start, end))


def pieces_of(num_tokens: int, interval: int) -> int:
    """Events with text once so many tokens were told: the first at once, then full intervals."""
    return 1 + (num_tokens - 1) // interval if num_tokens else 0


def tokens_of(model_path: Path) -> tuple[list[int], list[str]]:
    """(ids, texts) of the tokens that are five plain characters."""
    from serving.tokenizer import Tokenizer  # not where another project's server runs

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
    """The next thing asked of this process; {} when nothing more will be."""
    line = sys.stdin.readline()
    values: dict[str, Any] = json.loads(line) if line else {}
    return values


def inherited_socket(number: str) -> socket.socket:
    """One end of a pair whose other end another process of the benchmark has."""
    return socket.socket(fileno=int(number))
