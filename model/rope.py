"""Rotary embedding: what a checkpoint says of it, and the frequencies that follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from model.fields import Fields

# Fields that an object of rotary settings may have, by its kind. original_max_position_embeddings
# also comes with kinds that do not use it.
_KEYS: Final = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_KINDS: Final = {
    "default": _KEYS,
    "linear": (*_KEYS, "factor"),
    "llama3": (*_KEYS, "factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (*_KEYS, "factor", "beta_fast", "beta_slow", "truncate", "attention_factor"),
}
_LIMIT: Final = 1e6  # of numbers that are multiplied with others before they are used
_LATENT_KEYS: Final = ("mscale", "mscale_all_dim")  # of yarn where attention is latent
# Hunyuan's own kind, under the name of one that depends on the length. Only alpha counts.
_RAISED: Final = "dynamic"
_RAISED_KEYS: Final = (*_KINDS["yarn"], *_LATENT_KEYS, "alpha")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Which fields matter depends on the kind.

    factor: of positions; of the kind "dynamic", its alpha, which raises theta.
    attention_factor: of cosines and sines. softmax_factor: of the softmax's scale. share: the part
    of a head's entries that is rotated.
    Source: transformers, modeling_rope_utils (default, linear, llama3, yarn).
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0
    share: float = 1.0

    def turned_of(self, size: int) -> int:
        """How many of a head's entries are rotated, from the first on."""
        return int(size * self.share + 1e-6)  # a share may be a quotient


def read_rope(
    fields: Fields,
    default_theta: float,
    latent: bool = False,
    usual: Mapping[str, Any] = MappingProxyType({}),
    usual_share: float | None = None,
    raises_theta: bool = False,
) -> RopeConfig:
    """Read either form, or both where they say the same; transformers 5 obeys the older then.

    latent: whether attention is latent, as DeepSeek's. usual: settings where there are none.
    usual_share: the part of a head's entries that is rotated, where no field gives it; None: all,
    and nothing else is accepted. raises_theta: whether the kind "dynamic" is accepted, Hunyuan's,
    and yarn is not. Raises ModelError.
    """
    kinds = dict(_KINDS)
    if raises_theta:
        # Norms follow the rotation there, and would undo the factor that yarn gives it.
        del kinds["yarn"]
        kinds[_RAISED] = _RAISED_KEYS
    if latent:
        kinds["yarn"] += _LATENT_KEYS
    top = fields.theta()
    found: dict[str, RopeConfig] = {}
    for name in ("rope_scaling", "rope_parameters"):
        settings = fields.sub(name)
        if settings is None or not settings.values:
            continue
        theta = settings.theta() or top or default_theta
        if top is not None and theta != top:
            raise fields.fail("rope_theta", top, f"{theta}, as in {name}, or only one of the two")
        share = _share(fields, settings, usual_share)
        found[name] = replace(_settings(fields, settings, theta, kinds), share=share)
    if not found:
        settings = Fields(f"{fields.file}: rope_scaling", dict(usual))
        share = _share(fields, settings, usual_share)
        return replace(_settings(fields, settings, top or default_theta, kinds), share=share)
    rope, *others = found.values()
    if any(other != rope for other in others):
        got, accepted = fields.values["rope_scaling"], fields.values["rope_parameters"]
        raise fields.fail("rope_scaling", got, f"what rope_parameters says ({accepted}), or null")
    return rope


def _share(fields: Fields, settings: Fields, usual: float | None) -> float:
    """The part of a head's entries that is rotated. usual: see read_rope's usual_share."""
    name, found = "partial_rotary_factor", None
    for place in (settings, fields):
        value = place.number(name, None)
        if value is None:
            continue
        if usual is None and value != 1.0:
            raise place.fail(name, value, "1.0")
        if not 0.0 < value <= 1.0:
            raise place.fail(name, value, "a number above 0, and at most 1.0")
        if found not in (None, value):
            raise place.fail(name, value, f"{found}, as in {settings.file}, or only one of the two")
        found = value
    return found or usual or 1.0


def _settings(
    fields: Fields, settings: Fields, theta: float, kinds: Mapping[str, tuple[str, ...]]
) -> RopeConfig:
    """Read one object of either name. `type` is the older name of `rope_type`."""
    said = [x for name in ("rope_type", "type") if (x := settings.raw(name, None)) is not None]
    kind = settings.one_of("rope_type", said[0] if said else "default", tuple(kinds))
    if said[1:] not in ([], [kind]):
        raise settings.fail("type", said[1], f"{kind!r}, as in rope_type, or only one of the two")
    taken = kinds[kind]
    for name, value in settings.values.items():
        # Objects are settings of one layer type each, and would rotate its layers differently.
        if value is not None and name not in taken:
            accepted = f"null; fields of rope_type {kind!r}: {', '.join(taken)}"
            raise settings.fail(name, value, accepted)
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == _RAISED:
        return RopeConfig(kind, theta, settings.number("alpha", low=1.0))
    factor = settings.number("factor", low=1.0)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    original = settings.integer("original_max_position_embeddings")
    # transformers 5 obeys the outer one.
    outer = fields.integer("original_max_position_embeddings", original)
    if outer != original:
        accepted = f"{original}, as in {settings.file}, or only one of the two"
        raise fields.fail("original_max_position_embeddings", outer, accepted)
    if kind == "yarn":
        return _yarn(settings, theta, factor, original)
    rope = RopeConfig(
        kind,
        theta,
        factor,
        low_freq_factor=settings.number("low_freq_factor"),
        high_freq_factor=settings.number("high_freq_factor"),
        original_max_position=original,
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        accepted = f"more than low_freq_factor {rope.low_freq_factor}"
        raise settings.fail("high_freq_factor", rope.high_freq_factor, accepted)
    return rope


def _yarn(settings: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    """Source: arXiv:2309.00071; mscale as DeepSeek's modeling_deepseek.py has it."""
    if theta <= 1.0:
        raise settings.fail("rope_theta", theta, "a number above 1 with rope_type 'yarn'")
    fast, slow = settings.number("beta_fast", 32.0), settings.number("beta_slow", 1.0)
    if not 0.0 < slow <= fast:
        raise settings.fail("beta_slow", slow, f"above 0, and at most beta_fast {fast}")
    for name, value in (("beta_slow", slow), ("beta_fast", fast)):
        if not 1.0 / _LIMIT <= value <= _LIMIT:
            raise settings.fail(name, value, f"a number from {1.0 / _LIMIT:g} to {_LIMIT:g}")
    each, every = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    if bool(each) != bool(every) or max(each, every) > _LIMIT:
        # Implementations differ in what one alone means.
        accepted = f"a number up to {_LIMIT:g} beside mscale_all_dim, or neither of them"
        raise settings.fail("mscale", settings.raw("mscale", None), accepted)
    usual = _mscale(factor, each) / _mscale(factor, every) if each else _mscale(factor, 1.0)
    attention_factor = settings.number("attention_factor", usual)
    if attention_factor == 0.0:
        raise settings.fail("attention_factor", 0, "a number above 0, or null")
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=settings.flag("truncate", True),
        attention_factor=attention_factor,
        softmax_factor=_mscale(factor, every) ** 2,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def rope_frequencies(rope: RopeConfig, size: int) -> np.ndarray:
    """Radians per position of each rotated pair, f32[size / 2].

    Source: arXiv:2104.09864; llama3 and yarn scaling as transformers' modeling_rope_utils has it.
    """
    exponent = np.arange(0, size, 2, dtype=np.float64) / size
    freq = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == _RAISED:
        # As if theta were greater: the first pair is left alone, the last stretched alpha times.
        freq = freq / rope.factor ** (np.arange(size // 2) / max(size // 2 - 1, 1))
    elif rope.kind == "llama3":
        # Turns a pair makes over the original context: pairs with few are stretched, those with
        # many left alone, and the band between is blended.
        turns = rope.original_max_position * freq / (2.0 * math.pi)
        band = rope.high_freq_factor - rope.low_freq_factor
        blend = np.clip((turns - rope.low_freq_factor) / band, 0.0, 1.0)
        freq = (1.0 - blend) * freq / rope.factor + blend * freq
    elif rope.kind == "yarn":
        # The same by the pair's index, over which the blend is linear.
        low, high = _yarn_band(rope, size)
        stretched = np.clip((np.arange(size // 2) - low) / (high - low), 0.0, 1.0)
        freq = stretched * freq / rope.factor + (1.0 - stretched) * freq
    else:
        assert rope.kind == "default", rope.kind
    return freq.astype(np.float32)


def _yarn_band(rope: RopeConfig, size: int) -> tuple[float, float]:
    """The pairs between which the blend runs, as indices that need not be whole."""

    def pair(turns: float) -> float:
        span = rope.original_max_position / (turns * 2.0 * math.pi)
        return size * math.log(span) / (2.0 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, size - 1.0)
    return low, high if high != low else high + 0.001
