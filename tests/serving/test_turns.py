"""Calls beside the event loop: what happens where no thread can be started for them."""

import threading

import pytest

from serving.turns import Turns


async def test_a_call_for_which_there_is_no_thread_gives_its_turn_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns("turns", 1, 20.0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                await turns.run(threading.get_ident)
    assert await turns.run(threading.get_ident) != threading.get_ident()
