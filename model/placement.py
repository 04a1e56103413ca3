"""A worker's placed experts: the map that programs read, the rows they count, moves of weights.

A worker counts on the device which experts its rows choose. Now and then it takes the counts and
places one layer after another anew, between two calls to the device: weights and map change
together, so every call sees one placement of each layer. Nothing is compiled and nothing waits.
"""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model import eplb
from model.eplb import TRIVIAL, ExpertPolicy
from model.errors import ModelError
from model.members import is_leader
from model.moe import ExpertMap
from model.params import Params, Segment, segments
from model.programs import Program, abstract_like
from model.sharding import (
    RANKS,
    Dims,
    abstract_i32,
    expert_shard_idx,
    num_ranks,
    on_ranks,
    replicated,
    swap_experts,
)
from model.threads import in_daemon_thread
from model.transformer import Model

log = logging.getLogger(__name__)

_MAPS: Final = "physical_to_logical_map"
_COUNTS: Final = "logical_count"
_CALLS_TO_HOST: Final = 2  # a worker that dispatches a call has read the one before the last
_WORTH_MOVING: Final = 0.01  # gain in balancedness, so that noise in the counts moves nothing


class ExpertArgs(NamedTuple):
    """What programs take of a placement; None where experts stay as trained.

    expert_map: a model.moe.ExpertMap. loads: i32[ranks, layers, experts], rows that chose each,
    donated and returned with the call's rows added; None where rows are not counted.
    """

    expert_map: Any
    loads: Any


class PlacedExperts:
    """Owner of a worker's placement: the map, the counts, and the programs that move weights."""

    def __init__(self, model: Model, policy: ExpertPolicy) -> None:
        """Raises ModelError when a location file does not fit the model."""
        self._model, self._policy = model, policy
        self._parts = model.dims.ep
        # Runs of layers with experts, and their indices in the parameters.
        self._runs = [
            (idx, run)
            for idx, run in enumerate(segments(model.dims))
            if run.moe and policy.places_experts
        ]
        self._placed = _initial(model.dims, policy)
        self._move: dict[int, Program] = {}  # by the number of layers of a run
        self._map = self._sent_map() if policy.places_experts else None
        self._loads = self._no_loads() if policy.enable_eplb else None
        self._calls = 0  # since counting began
        self._counts: Array | None = None  # on their way to the host
        self._left: deque[tuple[int, np.ndarray]] = deque()  # layers to look at, with their counts
        self._seen: list[tuple[float, float]] = []  # their balancedness, before and after
        self.written: Future[None] | None = None  # done when the last counts are in their file
        # Another thread may read them, so no name is added later.
        self.counters: dict[str, float] = {}
        if policy.enable_eplb:
            self.counters = {f"eplb_{name}": 0.0 for name in ("rebalances", "experts_moved")}
            self.counters["eplb_balancedness"] = 1.0  # of the rows last seen, as placed then
        if policy.places_experts and not self._runs:
            raise ModelError(f"{model.cfg.architecture} has no experts that could be placed")

    @property
    def args(self) -> ExpertArgs:
        """For the next call to the device, which donates the loads."""
        return ExpertArgs(self._map, self._loads)

    @property
    def shapes(self) -> ExpertArgs:
        """The shapes of `args`."""
        return ExpertArgs(abstract_like(self._map), abstract_like(self._loads))

    @property
    def placed(self) -> np.ndarray:
        """i32[layers, physical]: logical experts."""
        return self._placed.copy()

    def programs(self, params: Params) -> list[Program]:
        """The programs that move experts of a layer, to be compiled. params: their shapes."""
        mesh, dims = self._model.mesh, self._model.dims
        all_specs = self._model.param_specs()
        physical = abstract_i32((dims.physical_experts,), mesh, P())
        local = abstract_i32((dims.physical_experts // dims.ep,), mesh, P())
        one = abstract_i32((), mesh, P())
        for idx, run in self._runs:
            if run.num_layers in self._move:
                continue  # experts of one network have one shape
            stacks, specs = (_experts(tree["layers"][idx]) for tree in (params, all_specs))
            mover = _mover(dims.ranks_share_experts, dims.ep)
            move = on_ranks(mesh, mover, (specs, P(), P(), P(), P()), specs)
            name = f"move[of layers={run.num_layers}]"
            args = (stacks, one, physical, local, one)
            self._move[run.num_layers] = Program(name, move, args, (0,))
        return list(self._move.values())

    def settle(self, params: Params) -> Params:
        """Move weights from the trivial placement, in which they are loaded, to the policy's."""
        wanted = self._placed
        self._placed = _trivial(self._model.dims)
        for _, run in self._runs:
            for layer in _layers(run):
                params = self._moved(params, layer, wanted[layer])
        return params  # the map said so from the start

    def counted(self, loads: Any) -> None:
        """Take the loads that a call to the device returned."""
        self._loads = loads
        self._calls += 1

    def turn(self, params: Params) -> Params:
        """Before a call to the device: do the next little step of placing experts anew.

        params: those that move are donated. Returns the parameters to go on with.
        """
        policy, before = self._policy, params
        if self._left:
            for _ in range(policy.eplb_rebalance_layers_per_chunk or len(self._left)):
                if self._left:
                    params = self._look_at(params, *self._left.popleft())
            if params is not before:
                self._map = self._sent_map()
            if not self._left:
                self._looked()
        elif self._counts is not None:
            if self._calls >= _CALLS_TO_HOST:
                counts = np.asarray(self._counts).sum(axis=0, dtype=np.int64)
                self._counts = None
                self._write(counts)
                self._left = deque((i, counts[i]) for _, run in self._runs for i in _layers(run))
        elif self._loads is not None and self._calls >= policy.eplb_rebalance_num_iterations:
            self._counts, self._loads, self._calls = self._loads, self._no_loads(), 0
            self._counts.copy_to_host_async()
        return params

    def _write(self, counts: np.ndarray) -> None:
        """Have the counts written by a thread, for the folder may be on a disk that hangs."""
        if not self._policy.expert_distribution_file or not is_leader():
            return
        file = Path(self._policy.expert_distribution_file)
        if self.written is not None and not self.written.done():
            what = "the counts before these are still being written"
            log.error("--expert-distribution-file %s is not written: %s", file, what)
            return
        self.written = in_daemon_thread(lambda: _write(file, counts), "expert counts")

    # --- one layer ------------------------------------------------------------------------------

    def _look_at(self, params: Params, layer: int, loads: np.ndarray) -> Params:
        """Place a layer anew if its loads make that worthwhile."""
        old = self._placed[layer].copy()
        was = now = eplb.balancedness(loads, old, self._parts)
        if was < self._policy.eplb_min_rebalancing_utilization_threshold:
            new = eplb.balanced(loads, old, self._parts)
            better = eplb.balancedness(loads, new, self._parts)
            if better > was + _WORTH_MOVING:
                params, now = self._moved(params, layer, new), better
                self.counters["eplb_experts_moved"] += int(np.count_nonzero(old != new))
        self._seen.append((was, now))
        return params

    def _looked(self) -> None:
        """Report, after all layers were looked at."""
        was, now = (float(share) for share in np.mean(self._seen, axis=0))
        self._seen = []
        self.counters["eplb_rebalances"] += 1
        self.counters["eplb_balancedness"] = was
        log.info("experts placed anew: balancedness of the rows seen %.3f, now %.3f", was, now)

    def _moved(self, params: Params, layer: int, new: np.ndarray) -> Params:
        """Dispatch the move of a layer's weights. The map has to follow before the next call."""
        old = self._placed[layer].copy()
        changed = np.flatnonzero((old != new).reshape(self._parts, -1).any(axis=0))
        if not len(changed):
            return params
        slots = np.zeros(len(new) // self._parts, np.int32)
        slots[: len(changed)] = changed
        idx, run = next(pair for pair in self._runs if layer in _layers(pair[1]))
        stacks = self._move[run.num_layers](
            _experts(params["layers"][idx]),
            np.int32(layer - run.first),
            eplb.sources(old, new, self._parts),
            slots,
            np.int32(len(changed)),
        )
        layers = list(params["layers"])
        layers[idx] = layers[idx] | stacks
        self._placed[layer] = new
        return params | {"layers": tuple(layers)}

    # --- arrays ---------------------------------------------------------------------------------

    def _sent_map(self) -> ExpertMap:
        cfg, dims = self._model.cfg, self._model.dims
        both = eplb.copies_of(self._placed, cfg.num_experts, dims.most_copies)
        return ExpertMap(*(_sent(array, replicated(self._model.mesh)) for array in both))

    def _no_loads(self) -> Array:
        cfg, mesh = self._model.cfg, self._model.mesh
        zeros = np.zeros((num_ranks(mesh), cfg.num_layers, cfg.num_experts), np.int32)
        return _sent(zeros, NamedSharding(mesh, RANKS))


def _write(file: Path, counts: np.ndarray) -> None:
    """Write the counts, so that a later start may use them; a reader sees all or none."""
    # Containers that share the folder may have the same process id.
    begun = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(8)}")
    try:
        try:
            begun.write_text(json.dumps({_COUNTS: counts.tolist()}))
            begun.replace(file)
        finally:
            begun.unlink(missing_ok=True)
    except OSError as error:
        log.error("--expert-distribution-file %s is not written: %s", file, error)


def _sent(array: np.ndarray, sharding: NamedSharding) -> Array:
    """An array on this process's devices. device_put would wait for all processes to compare it."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _layers(run: Segment) -> range:
    return range(run.first, run.first + run.num_layers)


def _experts(layers: dict[str, Any]) -> dict[str, Any]:
    """What moves: the parameters that have an axis of physical experts."""
    return {name: stack for name, stack in layers.items() if name.startswith("experts_")}


def _mover(share_experts: bool, num_parts: int) -> Callable[..., Any]:
    """The program of one device that moves experts of one layer."""

    def move(
        stacks: dict[str, Array], layer: Array, sources: Array, slots: Array, count: Array
    ) -> dict[str, Array]:
        """stacks: [layers, experts here, ...], donated. layer: of the stacks.

        sources: i32[physical], the physical expert whose weights each takes. slots: i32[experts
        here], of which the first `count` are the places, the same in every part, that change.
        """
        num_local = slots.shape[0]
        part = expert_shard_idx(share_experts)

        def moved(stack: Array) -> Array:
            # All places take weights from a copy, since the originals may already be overwritten.
            old = lax.dynamic_index_in_dim(stack, layer, keepdims=False)

            def place(i: Array, stack: Array) -> Array:
                slot = slots[i]
                wanted = sources.reshape(num_parts, num_local)[:, slot]
                # Send each part what it wants, if it is here; of what comes, take the owner's.
                got = swap_experts(old[wanted % np.int32(num_local)], share_experts)
                owner = wanted[part] // np.int32(num_local)
                at = [layer, slot, *(jnp.zeros((), jnp.int32),) * (stack.ndim - 2)]
                return lax.dynamic_update_slice(stack, got[owner][None, None], at)

            return lax.fori_loop(np.int32(0), count, place, stack)

        with jax.named_scope("move_experts"):
            return {name: moved(stack) for name, stack in stacks.items()}

    return move


def _trivial(dims: Dims) -> np.ndarray:
    row = eplb.trivial(dims.cfg.num_experts, dims.physical_experts)
    return np.tile(row, (dims.cfg.num_layers, 1))


def _initial(dims: Dims, policy: ExpertPolicy) -> np.ndarray:
    """i32[layers, physical]. Raises ModelError where a file does not fit."""
    location = policy.init_expert_location
    if location == TRIVIAL:
        return _trivial(dims)
    cfg = dims.cfg
    return read_location(location, cfg.num_layers, cfg.num_experts, dims.physical_experts, dims.ep)


def read_location(
    path: str, num_layers: int, num_experts: int, num_physical: int, num_parts: int
) -> np.ndarray:
    """The placement that a file gives: i32[layers, physical], logical experts.

    A JSON object with "physical_to_logical_map", [layers, physical], or "logical_count", [layers,
    experts] or several of them along a first axis, for which a placement is made. Raises ModelError
    naming the file, what it has and what is accepted.
    """
    try:
        told = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"--init-expert-location {path} is no JSON file: {error}") from None
    if not isinstance(told, dict) or (_MAPS in told) == (_COUNTS in told):
        raise ModelError(f'--init-expert-location {path}: takes "{_MAPS}" or "{_COUNTS}"')
    if _MAPS in told:
        maps = _integers(path, _MAPS, told[_MAPS], [(num_layers, num_physical)])
        everyone = np.arange(num_experts)
        if maps.max() >= num_experts or not all(np.isin(everyone, row).all() for row in maps):
            raise ModelError(
                f"--init-expert-location {path}: {_MAPS} must have each of {num_experts} experts "
                "in every layer, and no other"
            )
        # Rows use at most as many copies as there are parts, and loads assume one copy in a part.
        in_parts = np.sort(maps.reshape(num_layers, num_parts, -1))
        if (in_parts[..., 1:] == in_parts[..., :-1]).any():
            raise ModelError(
                f"--init-expert-location {path}: {_MAPS} has an expert twice in one of {num_parts} "
                "parts; accepted: copies in different parts"
            )
        return maps.astype(np.int32)
    one = (num_layers, num_experts)
    counts = _integers(path, _COUNTS, told[_COUNTS], [one, (-1, *one)])
    counts = counts.reshape(-1, *one).sum(axis=0)
    start = eplb.trivial(num_experts, num_physical)
    return np.stack([eplb.balanced(row, start, num_parts) for row in counts])


def _integers(path: str, name: str, values: Any, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """An array of integers from 0 on, of one of these shapes, in which -1 is any size."""
    try:
        found = np.array(values)
    except ValueError:
        found = np.array(None)
    fits = any(
        len(shape) == found.ndim
        and all(size in (-1, got) for size, got in zip(shape, found.shape, strict=True))
        for shape in shapes
    )
    if not fits or not np.issubdtype(found.dtype, np.integer) or not found.size or found.min() < 0:
        got = f"{found.dtype}{list(found.shape)}" if found.ndim else type(values).__name__
        accepted = " or ".join(str(list(shape)) for shape in shapes).replace("-1", "any")
        raise ModelError(
            f"--init-expert-location {path}: {name} is {got}; accepted: integers from 0 on, "
            f"{accepted}"
        )
    return found
