"""What clients ask of the system under faults: a catalogue; each entry has one right answer."""

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Route = Literal["completions", "chat", "generate", "whole", "responses"]

ROUTES: tuple[Route, ...] = ("completions", "chat", "generate", "whole", "responses")
WORDS = (
    *("ferry", "harbour", "page", "dawn", "crossing", "pilot", "light", "shore", "night", "cache"),
    *("water", "bell", "rope", "tide", "anchor", "north", "wind", "letter", "deck", "lamp"),
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "seed": 2**40 + 1, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0.9, "seed": 5, "regex": "([a-z]{1,9}[ .,]){400}"},
)


@dataclass(frozen=True)
class Ask:
    """One request. The same fields give the same tokens, wherever and however often it runs."""

    number: int
    route: Route
    prompt: str
    sampling: dict[str, Any]
    max_tokens: int

    def body(self, salt: str) -> dict[str, Any]:
        """The body for its route. salt: keeps cached prefixes apart without changing a token."""
        sampling = dict(self.sampling)
        regex = sampling.pop("regex", None)  # the regex, not EOS, then decides where the text ends
        more: dict[str, Any] = {"ignore_eos": True} if regex is None else {"regex": regex}
        if self.route == "generate":
            if "seed" in sampling:
                sampling["sampling_seed"] = sampling.pop("seed")
            values = {**sampling, **more, "max_new_tokens": self.max_tokens}
            return {
                "text": self.prompt,
                "sampling_params": values,
                "stream": True,
                "cache_salt": salt,
            }
        body = {**sampling, "max_tokens": self.max_tokens}
        more["cache_salt"] = salt
        if self.route == "chat":
            return body | {
                "messages": [{"role": "user", "content": self.prompt}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "extra_body": more,
            }
        if self.route == "responses":
            seed = {"seed": sampling.pop("seed")} if "seed" in sampling else {}
            penalties = {name: sampling.pop(name) for name in list(sampling) if "penalty" in name}
            return sampling | {
                "input": self.prompt,
                "max_output_tokens": self.max_tokens,
                "stream": True,
                "extra_body": more | seed | penalties,
            }
        body |= {"prompt": self.prompt, **more}
        if self.route == "completions":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True)
class Answer:
    """Everything a client was told; it must be the same each time. ids: () where there are none."""

    text: str
    ids: tuple[int, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def begins(self, whole: "Answer") -> bool:
        """Whether this answer, perhaps cut short, is a beginning of `whole`."""
        return whole.text.startswith(self.text) and whole.ids[: len(self.ids)] == self.ids


def draw_asks(rng: Random, count: int, context: int) -> list[Ask]:
    """A mix of routes, samplings, short prompts and some prompts of several chunks."""
    asks = []
    for number in range(count):
        is_long = rng.random() < 0.5
        words = rng.randrange(context // 8, context // 4) if is_long else rng.randrange(2, 12)
        prompt = " ".join(rng.choice(WORDS) for _ in range(words))
        asks.append(
            Ask(
                number,
                ROUTES[number % len(ROUTES)],
                prompt,
                SAMPLINGS[(number // len(ROUTES) + number) % len(SAMPLINGS)],
                rng.randrange(16, context // 4),
            )
        )
    return asks
