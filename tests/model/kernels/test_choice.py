"""The choice of backends at start-up."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from model import kernels

SHAPE = kernels.AttentionShape("cpu", "float32", 16, 2, 3, 8)


def _chosen(shape: kernels.AttentionShape) -> str:
    """The decode kernel of a shape, by the name of the function that handles a block."""
    kernel = kernels.choose("decode_attention", kernels.DECODE_ATTENTION, shape)
    assert isinstance(kernel, partial)
    return str(kernel.keywords["add"].__module__) if "add" in kernel.keywords else "reference"


def test_keys_of_several_heads_are_used_where_they_lie_on_a_processor_and_no_others() -> None:
    assert _chosen(SHAPE).endswith("unpacked")
    assert _chosen(replace(SHAPE, platform="gpu")) == "reference"
    assert _chosen(replace(SHAPE, planes=1, kv_heads=1)) == "reference"


def _refuse(shape: Any) -> Callable[..., Any]:
    raise NotImplementedError(f"no {shape.platform}")


def test_a_backend_that_refuses_makes_way_for_the_next_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kernel() -> None: ...

    backends = [kernels.Backend("fast", _refuse), kernels.Backend("plain", lambda shape: kernel)]
    with caplog.at_level(logging.INFO):
        assert kernels.choose("op", backends, SHAPE) is kernel
    assert "op: plain (refused: ['fast: no cpu'])" in caplog.text


def test_when_none_can_serve_every_refusal_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"no backend of op serves .*fast: no cpu"):
        kernels.choose("op", [kernels.Backend("fast", _refuse)], SHAPE)
