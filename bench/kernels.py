"""Times a device's work piece by piece, with random weights, and compares it with its floor.

It uses one device. Whole steps come first (decode step, prefill chunk), then what they are made of
(attention, experts, sampling), then pages in and out. Floors come from bench/floors with ceilings
measured in the same run. A piece of one layer takes the pages and weights of another layer in each
call, as a step does, since those of a single layer would stay in an accelerator's cache. Those of
attention of a few short rows stay there all the same: it is timed in four layers only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.ceilings import measure_ceilings
from bench.contexts import decode_contexts
from bench.fitting import TRAVEL_PAGES, context_pages, model_of, pool_pages, table_pages
from bench.floors import (
    Ceilings,
    Cost,
    decode_attention_cost,
    decode_step_cost,
    moe_cost,
    prefill_attention_cost,
    prefill_chunk_cost,
)
from bench.report import Report
from bench.shapes import Shape
from bench.timing import ENDLESS, Allowance, seconds_per_call
from model import page_runs
from model.attention import ChunkBatch, window_of
from model.buckets import pages_for
from model.kv import gather_pages, init_pool, write_pages
from model.moe import expert_stacks
from model.page_groups import Place, decode_groups, group_of_layer, of_groups, place_of
from model.programs import Program, compile_all
from model.replicated import decode_hidden, logits, prefill_hidden
from model.sampling import Asks, empty_rows, sample
from model.sharding import replicated
from model.transformer import Model, random_params
from transfer.buffers import BufferPool

# Parts that are compiled side by side. Steps donate the pool, which pieces have as an argument.
STEPS: Final = ("decode", "prefill")
PIECES: Final = ("attention", "experts", "sampling")
_TOGETHER: Final = 4  # layers in one program at most; tracing more takes long


def greedy_step(
    model: Model, params: Any, pool: Any, ids: Any, positions: Any, table: Any, idx: Any
) -> tuple[Any, Any]:
    """One token for every slot, logits and greedy choice included; returns ids and pool."""
    hidden, pool = decode_hidden(model, params, pool, ids, positions, table, idx)
    scores = logits(model, params, hidden)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), pool


def last_logits(model: Model, params: Any, pool: Any, batch: ChunkBatch) -> tuple[Any, Any]:
    """A chunk; returns the logits of its last token and the pool."""
    hidden, pool = prefill_hidden(model, params, pool, batch)
    return logits(model, params, hidden[-1:]), pool


class Case(NamedTuple):
    """One program to time, and the least work of a call."""

    name: str
    program: Program
    turns: Sequence[tuple[Any, ...]]  # arguments of the same shapes, used in turn
    cost: Cost
    sizes: dict[str, int]
    tokens: int = 0  # of a whole step or chunk, which takes parameters and pool before `turns`
    layers: int = 1  # layers that one call computes, one after the other


class KernelBench:
    """One network on one device: owns its parameters and the pool that calls donate."""

    def __init__(
        self,
        report: Report,
        shape: Shape,
        ceilings: Ceilings,
        budget_s: float,
        allowance: Allowance = ENDLESS,
    ) -> None:
        self.report = report
        self.shape = shape
        self.ceilings = ceilings
        self.budget_s = budget_s
        self.allowance = allowance
        self.compiling_s = 0.0  # the longest so far: compiling cannot be cut short
        self.rng = np.random.default_rng(report.seed)
        self.model = model_of(shape)
        self.params = random_params(self.model, report.seed)
        self.pages_per_slot = context_pages(shape)
        self.num_pages = pool_pages(shape)
        self.pool = init_pool(self.model.kv_spec(), self.num_pages, self.model.mesh)

    def measure(self, parts: Iterable[str]) -> None:
        """Add rows for the cases of these methods: compile all side by side, then time each."""
        start_s = self.allowance.clock()
        cases = [case for part in parts for case in getattr(self, part)()]
        compile_all([case.program for case in cases])
        self.compiling_s = max(self.compiling_s, self.allowance.clock() - start_s)
        timing = {case.name: partial(self._time, case) for case in cases}
        self.allowance.spend(timing, self.report.out)

    # --- whole steps --------------------------------------------------------------------------

    def decode(self) -> list[Case]:
        """One token for every slot, including logits and greedy choice."""
        cases = []
        for slots in self.shape.slots:
            cost = decode_step_cost(self.shape, slots, self.shape.context)
            args = self.step_args(slots)
            cases.append(
                self._whole(f"decode step x{slots}", greedy_step, args, cost, "slots", slots)
            )
        return cases

    def prefill(self) -> list[Case]:
        """One prompt in one chunk, including the logits of its last token."""
        cases = []
        for tokens in self.shape.chunks:
            cost = prefill_chunk_cost(self.shape, tokens)
            args = self.chunk_args(tokens)
            cases.append(
                self._whole(f"prefill chunk {tokens}", last_logits, args, cost, "tokens", tokens)
            )
        return cases

    # --- parts --------------------------------------------------------------------------------

    def attention(self) -> list[Case]:
        """Attention over pages, without projections, of one layer of each kind."""
        return [
            case
            for name, layers in self.attention_layers().items()
            for case in (
                *self._decode_attention(f"decode {name}", layers),
                *self._prefill_attention(f"prefill {name}", layers),
            )
        ]

    def _decode_attention(self, name: str, layers: Sequence[int]) -> Iterator[Case]:
        windowed, kernel = self._windowed(layers[0]), self.model.kernels.decode_attention
        for rows, contexts in decode_contexts(self.shape, self.num_pages).items():
            turns = self._of_layers(self.decode_attention_inputs(contexts, layers[0]), layers)
            cost = decode_attention_cost(self.shape, contexts, windowed)
            sizes = {"slots": len(contexts)}
            yield self._layer_by_layer(f"{name} {rows}", kernel, turns, cost, sizes)

    def _prefill_attention(self, name: str, layers: Sequence[int]) -> Iterator[Case]:
        windowed, kernel = self._windowed(layers[0]), self.model.kernels.prefill_attention
        if self.shape.cfg.latent and not self.model.on_cpu:
            return  # long chunks then have keys and values for each head: model/latent.py
        for tokens in self.shape.chunks:
            turns = self._of_layers(self.prefill_attention_inputs(tokens, layers[0]), layers)
            cost = prefill_attention_cost(self.shape, tokens, windowed)
            yield self._layer_by_layer(f"{name} {tokens}", kernel, turns, cost, {"tokens": tokens})

    def experts(self) -> Iterator[Case]:
        """One layer's routed experts, evenly chosen; nothing for a dense network."""
        if not self.shape.cfg.num_experts:
            return
        kernel = self.model.kernels.experts
        for tokens in (*self.shape.slots, *self.shape.chunks):
            turns = self._of_expert_layers(self.experts_inputs(tokens))
            cost, sizes = moe_cost(self.shape, tokens), {"tokens": tokens}
            # With few pairs, a call of a single layer would measure the host's time to launch it.
            few = tokens * self.shape.cfg.num_experts_per_tok < self.shape.cfg.num_experts
            piece = self._layer_by_layer if few else self._piece
            yield piece(f"experts {tokens} tokens", kernel, turns, cost, sizes)

    def sampling(self) -> Iterator[Case]:
        """Logits to ids, as in a step: all rows greedy, and all rows with top-p."""
        vocab, on_cpu = self.shape.cfg.vocab_size, self.model.on_cpu
        for name, asks, top_p in (("greedy", Asks.GREEDY, 1.0), ("top-p", Asks.FILTERED, 0.9)):

            def draw(scores: Any, rows: Any, token_idx: Any, asks: Asks = asks) -> Any:
                none = jnp.zeros((scores.shape[0], 1), jnp.int32)
                length = jnp.zeros(scores.shape[0], jnp.int32)
                history = none, length, length
                own = Asks.ANYTHING if on_cpu else asks
                return sample(scores, rows, lambda: history, token_idx, None, None, own, on_cpu)

            for slots in self.shape.slots:
                scores = jnp.asarray(self.rng.standard_normal((slots, vocab), np.float32))
                rows = empty_rows(slots)
                rows.top_p[:] = top_p
                rows.temperature[:] = 0.8 if asks > Asks.GREEDY else 0.0
                turns = [(scores, rows, np.zeros(slots, np.int32))]
                cost = Cost(slots * vocab * 4.0, 0.0)
                yield self._piece(f"sampling {name} x{slots}", draw, turns, cost, {"slots": slots})

    def pages(self) -> None:
        """Payload a second of pages that are packed, moved to the host and back, and put in place.

        On a CPU, device and host share memory, so that nothing is moved between them.
        """
        shape = {"pages": TRAVEL_PAGES, "page_size": self.shape.page_size}
        num_bytes = TRAVEL_PAGES * self.model.kv_spec().page_bytes
        scattered = self.rng.permutation(self.num_pages)[:TRAVEL_PAGES].astype(np.int32)
        ids = jax.device_put(scattered)

        def row(metric: str, taken_s: float) -> None:
            # A page moved on the device is read once and written once.
            on_device = metric in ("gather", "scatter")
            peak = self.ceilings.copy_gb_s / 2 if on_device else None
            case = f"{TRAVEL_PAGES} pages"
            self._add(case, metric, num_bytes / taken_s / 1e9, "GB/s", peak, shape)

        gather = Program("gather", gather_pages, (self.pool, ids)).compile()
        row("gather", self._measure(lambda: gather(self.pool, ids)))
        staged = gather(self.pool, ids)
        # The kind of memory into which another worker's pages arrive.
        memory = BufferPool(0, page_runs.memory_pinner(self.model.mesh)).take(staged.nbytes)
        host = memory.view(staged.dtype).reshape(staged.shape)
        host[...] = np.asarray(staged)

        def to_host() -> Any:
            # A new array each time: JAX keeps the host's copy of one and would return that.
            return np.asarray(page_runs.to_host(gather(self.pool, ids)))

        if jax.devices()[0].platform != "cpu":
            gathering_s = self._measure(lambda: gather(self.pool, ids))
            row("to host", max(self._measure(to_host) - gathering_s, 1e-9))
            row("to device", self._measure(lambda: jax.device_put(host, staged.sharding)))
        write = partial(write_pages, on_cpu=self.model.on_cpu)
        scatter = Program("scatter", write, (self.pool, staged, ids), donate=(0,)).compile()

        def put() -> Any:
            self.pool = scatter(self.pool, staged, ids)
            return self.pool

        row("scatter", self._measure(put))

    # --- inputs -------------------------------------------------------------------------------

    def fill_pool(self) -> None:
        """Put random keys and values in every page: with zeros, any attention would be right."""
        key = jax.random.key(self.report.seed)

        def layer(i: Any, pool: Any) -> Any:
            drawn = jax.random.normal(jax.random.fold_in(key, i), pool.shape[1:], pool.dtype)
            return pool.at[i].set(drawn)

        # Layer by layer: draws for the whole pool would not fit beside it.
        fill = jax.jit(lambda pool: lax.fori_loop(0, pool.shape[0], layer, pool), donate_argnums=0)
        self.pool = fill(self.pool)

    def attention_layers(self) -> dict[str, list[int]]:
        """The layers that have each kind of attention, by the kind's name in rows."""
        found: dict[str, list[int]] = {}
        for layer in range(self.shape.cfg.num_layers):
            name = "windowed attention" if self._windowed(layer) else "attention"
            found.setdefault(name, []).append(layer)
        return found

    def decode_attention_inputs(self, contexts: Sequence[int], layer: int) -> tuple[Any, ...]:
        """Arguments of a decode attention kernel, for rows with these numbers of tokens."""
        positions, table = map(jnp.asarray, self._table(contexts))
        sizes = self.shape.page_size, self.num_pages
        rows = decode_groups(self.shape.cfg, *sizes, positions, table, positions, None)
        own = rows.of(self._place(layer).group)
        return (self._queries(len(contexts)), *self._of_layer(layer, *own))

    def prefill_attention_inputs(self, tokens: int, layer: int) -> tuple[Any, ...]:
        """Arguments of a prefill attention kernel: one prompt that fills the chunk."""
        batch, group = self._chunk(tokens), self._place(layer).group
        page_ids = of_groups(self.shape.cfg, batch.page_ids, self.num_pages)[group]
        batch = batch._replace(page_ids=page_ids)
        return (self._queries(tokens), *self._of_layer(layer, batch))

    def experts_inputs(self, tokens: int) -> tuple[Any, ...]:
        """Arguments of an experts kernel; all experts are equally likely."""
        cfg = self.shape.cfg
        order = self.rng.random((tokens, cfg.num_experts)).argsort(axis=1)
        ids = jnp.asarray(order[:, : cfg.num_experts_per_tok].astype(np.int32))
        weights = jnp.full(ids.shape, 1.0 / cfg.num_experts_per_tok, jnp.float32)
        x = self.random((tokens, cfg.hidden_size))
        return (x, ids, weights, *self.experts_of_layers()[0])

    # --- helpers ------------------------------------------------------------------------------

    def experts_of_layers(self) -> list[tuple[Any, ...]]:
        """Arguments of an experts kernel after rows and choices, for each layer with experts."""
        return [
            (expert_stacks(stacks), jnp.int32(layer))
            for stacks in self.params["layers"]
            for layer in range(len(stacks.get("experts_down", ())))
        ]

    def _of_expert_layers(self, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [(*args[:3], *own) for own in self.experts_of_layers()]

    def _windowed(self, layer: int) -> bool:
        windows = self.shape.cfg.window_layers
        return bool(windows) and windows[layer]

    def _of_layer(self, layer: int, *rows: Any) -> tuple[Any, ...]:
        """Arguments of an attention kernel after its queries."""
        cfg, dims = self.shape.cfg, self.model.dims
        sinks = self.random((dims.kv_heads, dims.group)) if cfg.sinks else None
        window = window_of(cfg, jnp.int32(layer))
        return (self.pool, self._place(layer).layer, *rows, sinks, window)

    def _layer_by_layer(
        self,
        name: str,
        kernel: Callable[..., Any],
        turns: Sequence[tuple[Any, ...]],
        cost: Cost,
        sizes: dict[str, int],
    ) -> Case:
        """A kernel in several layers of one kind, in one program. turns: arguments in each layer.

        As in a step, what is the same for all layers is made once, and no launch is waited for. The
        first argument of each layer depends on the layer before, so that they run in order.
        """
        several = turns[:: -(-len(turns) // _TOGETHER)]

        def one_by_one(x: Any, layers: Any) -> Any:
            for rest in layers:
                out = kernel(x, *rest)
                x = x + (out.reshape(-1)[0] * out.dtype.type(0)).astype(x.dtype)
            return out

        args = several[0][0], [rest for _, *rest in several]
        return self._piece(name, one_by_one, [args], cost, sizes)._replace(layers=len(several))

    def _of_layers(self, args: tuple[Any, ...], layers: Sequence[int]) -> list[tuple[Any, ...]]:
        """Arguments of an attention kernel for each of these layers, which are of one kind."""
        queries, pool, _, *rest = args
        return [(queries, pool, self._place(layer).layer, *rest) for layer in layers]

    def _place(self, layer: int) -> Place:
        cfg = self.shape.cfg
        return place_of(cfg, jnp.int32(layer), group_of_layer(cfg, layer))

    def _ids(self, count: int) -> np.ndarray:
        return self.rng.integers(0, self.shape.cfg.vocab_size, count).astype(np.int32)

    def step_args(self, slots: int) -> tuple[Any, ...]:
        """Arguments of `greedy_step` after parameters and pool."""
        positions, table = self._table([self.shape.context] * slots)
        last = table[:, self.pages_per_slot - 1]
        kv_idx = last * self.shape.page_size + positions % self.shape.page_size
        args: tuple[Any, ...] = jax.device_put((self._ids(slots), positions, table, kv_idx))
        return args

    def chunk_args(self, tokens: int) -> tuple[Any, ...]:
        """Arguments of `last_logits` after parameters and pool."""
        return (self._chunk(tokens),)

    def program(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Program:
        """`greedy_step` or `last_logits` of this network. args: after parameters and pool."""
        taken = (self.params, self.pool, *args)
        return Program(name, partial(function, self.model), taken, donate=(1,))

    def _table(self, contexts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Positions i32[slots] and page tables i32[slots, table_pages], pages scattered."""
        positions = np.array(contexts, np.int32)
        used = positions // self.shape.page_size + 1
        width = max(table_pages(self.shape, len(contexts), self.model), *used)
        table = np.zeros((len(contexts), width), np.int32)
        is_used = np.arange(width) < used[:, None]
        table[is_used] = self.rng.permutation(self.num_pages)[: used.sum()]
        return positions, table

    def _chunk(self, tokens: int) -> ChunkBatch:
        size = self.shape.page_size
        num_pages = pages_for(tokens, size)
        page_ids = self.rng.permutation(self.num_pages)[:num_pages].astype(np.int32)
        positions = np.arange(tokens, dtype=np.int32)
        batch = ChunkBatch(
            token_ids=jnp.asarray(self._ids(tokens)),
            positions=jnp.asarray(positions),
            seq_idx=jnp.zeros(tokens, jnp.int32),
            kv_idx=jnp.asarray(page_ids[positions // size] * size + positions % size),
            page_ids=jnp.asarray(page_ids),
            page_seq=jnp.zeros(num_pages, jnp.int32),
            page_pos=jnp.arange(num_pages, dtype=jnp.int32) * size,
            num_pages_used=jnp.int32(num_pages),
        )
        return jax.tree.map(lambda x: jax.device_put(x, replicated(self.model.mesh)), batch)

    def _queries(self, rows: int) -> jax.Array:
        cfg, dims = self.shape.cfg, self.model.dims
        return self.random((rows, dims.kv_heads, dims.group, cfg.head_dim))

    def random(self, shape: tuple[int, ...]) -> jax.Array:
        values = self.rng.standard_normal(shape, np.float32)
        return jnp.asarray(values).astype(self.model.dtype)

    def _measure(self, call: Callable[[], Any]) -> float:
        return seconds_per_call(call, jax.block_until_ready, self.budget_s)

    def _whole(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        cost: Cost,
        unit: str,
        tokens: int,
    ) -> Case:
        """A step or a chunk. tokens: its number of slots or tokens; unit says which."""
        program = self.program(name, function, args)
        return Case(name, program, [args], cost, {unit: tokens}, tokens)

    def _piece(
        self,
        name: str,
        function: Callable[..., Any],
        turns: Sequence[tuple[Any, ...]],
        cost: Cost,
        sizes: dict[str, int],
    ) -> Case:
        placed = jax.device_put(list(turns))
        return Case(name, Program(name, function, placed[0]), placed, cost, sizes)

    def _call_of(self, case: Case) -> Callable[[], Any]:
        turns = cycle(case.turns)

        def step() -> Any:
            out, self.pool = case.program(self.params, self.pool, *next(turns))
            return out

        return step if case.tokens else lambda: case.program(*next(turns))

    def _time(self, case: Case) -> None:
        taken_s = self._measure(self._call_of(case)) / case.layers
        floor_s, sizes = case.cost.floor_s(self.ceilings), case.sizes
        self._add(case.name, "time", taken_s * 1e3, "ms", floor_s * 1e3, sizes)
        self._add(case.name, "share of floor", floor_s / taken_s, "share", None, sizes)
        self._add(case.name, "bytes", case.cost.num_bytes / 1e6, "MB", None, sizes)
        self._add(case.name, "products", case.cost.flops / 1e9, "GFLOP", None, sizes)
        if tokens := case.tokens:
            self._add(case.name, "rate", tokens / taken_s, "tok/s", tokens / floor_s, sizes)

    def _add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        baseline: float | None,
        sizes: dict[str, int],
    ) -> None:
        shapes: dict[str, Any] = {"shape": self.shape.name, "dtype": self.shape.dtype, **sizes}
        shapes |= {"context": self.shape.context, "budget_s": self.budget_s}
        self.report.add(f"{self.shape.name} {case}", metric, value, unit, baseline, shapes=shapes)


def run(
    report: Report,
    shape: Shape,
    parts: Sequence[str],
    budget_s: float,
    allowance: Allowance = ENDLESS,
) -> None:
    """Measure the ceilings, then the parts asked for."""
    ceilings = measure_ceilings(report, shape.dtype, budget_s)
    bench = KernelBench(report, shape, ceilings, budget_s, allowance)
    for together in (STEPS, PIECES):
        bench.measure(part for part in together if part in parts)
    if "pages" in parts:
        bench.pages()
