"""A program compiled before is loaded unchanged; a cache that cannot be read only costs time."""

import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model import executables, fingerprint, processors
from model.executables import ExecutableCache, Recipe
from model.programs import Program, compile_all
from model.sampling import Asks, empty_rows
from model.sharding import make_mesh

DAY_S = 86400
changed_since = executables._changed_since
# For programs without options of their own.
OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
MESH = make_mesh(2, 1)
ARGS = tuple(
    jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(MESH, spec))
    for spec in (P("tensor"), P())
)


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def matrix_of(held: int) -> Callable[[jax.Array, jax.Array], dict[str, jax.Array]]:
    """A product and more, so that XLA generates code for it."""

    def matrix(left: jax.Array, right: jax.Array) -> dict[str, jax.Array]:
        return {"sum": jnp.sin(left @ right) + jnp.float32(held), "left": left * jnp.float32(2)}

    return matrix


@pytest.fixture
def held() -> int:
    """A number that no earlier program had, so that no cache has this one."""
    return secrets.randbelow(1 << 20)


@pytest.fixture(autouse=True)
def _of_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_KNOWN", (*fingerprint._KNOWN, "tests"))
    # Whether sources were saved a moment before these tests began does not matter to them.
    monkeypatch.setattr(executables, "_changed_since", lambda _: False)


def made(folder: Path, held: int, **changed: Any) -> Program:
    """The program, requested as a process that has just started would."""
    program = Program("matrix", matrix_of(held), changed.get("args", ARGS), donate=(0,))
    compile_all([program], changed.get("more"), ExecutableCache(folder))
    return program


@contextmanager
def jax_keeping_in(folder: Path) -> Iterator[None]:
    """Have JAX keep what it compiles in this folder."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def result(program: Program) -> np.ndarray:
    """The result of one run, which must donate its first argument."""
    arrays = [
        jax.device_put(np.full((4, 4), value, np.float32), arg.sharding)
        for value, arg in zip((0.1, 0.2), ARGS, strict=True)
    ]
    out = program(*arrays)
    assert arrays[0].is_deleted()
    assert out["left"].sharding.spec == P("tensor")
    return np.asarray(out["sum"])


class Lowered(list):
    """What gets traced and lowered from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lower = executables._lowered

        def counted(*args: Any) -> Any:
            self.append(args)
            return lower(*args)

        monkeypatch.setattr(executables, "_lowered", counted)


def test_what_was_compiled_before_is_not_traced(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path, held)
    lowered = Lowered(monkeypatch)
    again = made(tmp_path, held)
    assert (first.was_kept, again.was_kept, lowered) == (False, True, [])
    assert again.temp_bytes == first.temp_bytes > 0
    np.testing.assert_array_equal(result(again), result(first))


def test_other_programs_are_other_executables(tmp_path: Path, held: int) -> None:
    first, other = made(tmp_path, held), made(tmp_path, held + 1)
    assert not other.was_kept
    np.testing.assert_allclose(result(other) - result(first), 1.0)
    assert not made(tmp_path, held, more={"xla_backend_optimization_level": "1"}).was_kept
    assert not made(tmp_path, held, args=ARGS[::-1]).was_kept


def test_a_change_of_source_that_changes_no_program_costs_one_lowering(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path, held)
    monkeypatch.setattr(executables, "digest_of_sources", lambda: "another")
    lowered = Lowered(monkeypatch)
    programs = [made(tmp_path, held) for _ in range(2)]
    assert [program.was_kept for program in programs] == [True, True]
    assert len(lowered) == 1
    np.testing.assert_array_equal(result(programs[1]), result(first))


def test_a_setting_of_xla_or_jax_makes_other_executables(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, held)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
        assert not made(tmp_path, held).was_kept
    with jax.numpy_dtype_promotion("standard"):
        assert not made(tmp_path, held).was_kept
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_processor", lambda: "another")
        assert not made(tmp_path, held).was_kept
    with monkeypatch.context() as patch:  # as if fewer processors were available
        patch.setattr(processors, "threads", lambda _: 77)
        assert not made(tmp_path, held).was_kept
    assert made(tmp_path, held).was_kept


@pytest.mark.parametrize("content", [b"", bytes(64), b"../" * 21 + b"a", b"\n", b"a" * 64])
def test_a_name_that_is_none_leads_nowhere(tmp_path: Path, held: int, content: bytes) -> None:
    first = made(tmp_path, held)
    (asked,) = tmp_path.glob("asked-*")
    named = asked.read_bytes()
    asked.write_bytes(content)
    again = made(tmp_path, held)
    assert again.was_kept  # found by the program's text
    assert asked.read_bytes() == named
    np.testing.assert_array_equal(result(again), result(first))


@pytest.mark.parametrize("harm", [b"", b"short", None])
def test_one_that_cannot_be_read_is_compiled_and_written_again(
    tmp_path: Path, held: int, harm: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    first = made(tmp_path, held)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"\xff" if harm is None else harm)
    again = made(tmp_path, held)
    assert not again.was_kept
    assert "is compiled again" in caplog.text
    np.testing.assert_array_equal(result(again), result(first))
    assert made(tmp_path, held).was_kept


def test_a_folder_that_cannot_be_used_costs_nothing_but_time(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "taken"
    folder.write_text("by a file")
    with jax_keeping_in(folder):
        kept = ExecutableCache.beside_compiled()
    assert caplog.text.count("executables are not kept") == 1
    program = Program("matrix", matrix_of(held), ARGS, donate=(0,))
    compile_all([program], kept=kept)
    assert result(program).shape == (4, 4)


def test_threads_that_fail_to_write_at_once_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ExecutableCache(tmp_path)
    full, said = OSError(errno.ENOSPC, "no space"), []

    def slow(*words: object) -> None:
        said.append(words)
        if len(said) < 3:  # the next thread fails while this one writes its line
            other = threading.Thread(target=cache._writes_no_more, args=(full,))
            other.start()
            other.join()

    monkeypatch.setattr(executables.log, "warning", slow)
    cache._writes_no_more(full)
    assert len(said) == 1


def test_what_only_jax_has_kept_is_compiled_once_more_and_saved(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recipe(matrix_of(held), ARGS, (0,), OPTIONS).compile()
    for _ in range(2):
        lowered = Lowered(monkeypatch)
        assert not made(tmp_path, held).was_kept
        assert len(lowered) == 2, "JAX had not kept it"
        loaded = made(tmp_path, held)
        assert loaded.was_kept
        assert result(loaded).shape == (4, 4)
        for path in tmp_path.iterdir():
            path.unlink()
        monkeypatch.undo()
        monkeypatch.setattr(fingerprint, "_KNOWN", (*fingerprint._KNOWN, "tests"))


def test_a_folder_that_may_only_be_read_is_read(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, held)
    monkeypatch.setattr(executables.os, "access", lambda *_: False)
    lowered, before = Lowered(monkeypatch), sorted(tmp_path.iterdir())
    assert made(tmp_path, held).was_kept
    assert lowered == []
    for _ in range(2):  # the second time it comes from JAX's cache, not compiled anew
        assert not made(tmp_path, held + 1).was_kept
    assert len(lowered) == 2
    assert sorted(tmp_path.iterdir()) == before
    assert caplog.text.count("may not be written to") == 3  # once per process, here each `made`


@pytest.mark.parametrize("donate", [(), (0,)])
def test_programs_that_differ_in_which_argument_they_read_are_told_apart(
    tmp_path: Path, held: int, donate: tuple[int, ...]
) -> None:
    def pick(idx: int) -> Callable[..., jax.Array]:
        def one(*args: jax.Array) -> jax.Array:
            return args[idx] * jnp.float32(held)

        return one

    for idx in (0, 1, 0, 1):
        program = Program("pick", pick(idx), ARGS[:1] * 2, donate=donate)
        compile_all([program], kept=ExecutableCache(tmp_path))
        arrays = (
            jax.device_put(np.full((4, 4), value, np.float32), ARGS[0].sharding) for value in (1, 2)
        )
        np.testing.assert_array_equal(program(*arrays), np.full((4, 4), (idx + 1) * held))


def test_programs_that_differ_in_what_they_give_away_are_told_apart(
    tmp_path: Path, held: int
) -> None:
    for donate in ((0,), (), (0,)):
        program = Program("matrix", matrix_of(held), ARGS, donate=donate)
        compile_all([program], kept=ExecutableCache(tmp_path))
        left, right = (jax.device_put(np.zeros((4, 4), np.float32), a.sharding) for a in ARGS)
        program(left, right)
        assert left.is_deleted() == (donate == (0,))


def test_programs_that_differ_in_the_shape_of_what_they_give_are_told_apart(
    tmp_path: Path, held: int
) -> None:
    def pair(kind: Any) -> Callable[..., Any]:
        def both(left: jax.Array) -> Any:
            parts = left + jnp.float32(held), left
            return Pair(*parts) if kind is Pair else kind(parts)

        return both

    array = jax.device_put(np.zeros((4, 4), np.float32), ARGS[0].sharding)
    for kind in (tuple, list, Pair) * 2:
        program = Program("pair", pair(kind), ARGS[:1])
        compile_all([program], kept=ExecutableCache(tmp_path))
        assert type(program(array)) is kind


def test_programs_are_loaded_side_by_side(tmp_path: Path, held: int) -> None:
    for was_kept in (False, True):
        programs = [
            Program(f"matrix {i}", matrix_of(held + i), ARGS, donate=(0,)) for i in range(8)
        ]
        compile_all(programs, kept=ExecutableCache(tmp_path))
        assert [program.was_kept for program in programs] == [was_kept] * 8
        first = result(programs[0])
        for i, program in enumerate(programs):
            np.testing.assert_allclose(result(program), first + i, rtol=1e-6)


@pytest.mark.parametrize("kept", [True, False])
def test_programs_of_one_text_are_compiled_one_after_the_other(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """JAX writes the files of its cache in place: each would read what the other is writing."""
    monkeypatch.setattr(processors, "available", lambda: 2)
    both_compile, compile_one = threading.Barrier(2), jax.stages.Lowered.compile
    met: list[int] = []

    def compile_beside(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
        with suppress(threading.BrokenBarrierError):
            met.append(both_compile.wait(1.0))
        return compile_one(lowered, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_beside)

    def matrix_beside(unused: int) -> Callable[..., Any]:
        compute = matrix_of(held)

        def matrix(*args: jax.Array) -> Any:
            assert unused in (1, 2)
            return compute(*args)

        return matrix

    programs = [Program(f"beside {i}", matrix_beside(i), ARGS) for i in (1, 2)]
    compile_all(programs, kept=ExecutableCache(tmp_path) if kept else None)
    assert not met


def test_what_was_last_read_a_month_before_another_is_removed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, held: int
) -> None:
    """Also what a killed write left. If all files of a folder are old, none is removed."""
    made(tmp_path, held)
    mine = set(tmp_path.iterdir())
    theirs, left = tmp_path / "asked-by-the-other-role", tmp_path / "tmp8s1x"
    now_s = tmp_path.stat().st_mtime
    for path in (*mine, theirs, left):
        path.touch()
        os.utime(path, (0, now_s - 40 * DAY_S))
    cache = ExecutableCache(tmp_path)
    cache.remove_forgotten(now_s)
    assert made(tmp_path, held).was_kept
    cache.remove_forgotten(now_s)  # like the other role, which has read nothing yet
    assert set(tmp_path.iterdir()) == {*mine, theirs, left}
    os.utime(theirs, (0, now_s))  # now it has read
    jax_s = tmp_path_factory.mktemp("jax")
    beside = [jax_s / f"{number}-cache" for number in range(4)]
    # The last two were left by a full disk, and are being written.
    for path, text, days in zip(beside, ("a", "a", "", ""), (29, 31, 1, -2), strict=True):
        path.write_text(text)
        os.utime(path, (0, now_s - days * DAY_S))
    cache.remove_forgotten(now_s + 2 * DAY_S, beside)
    assert set(tmp_path.iterdir()) == {*mine, theirs}
    assert [path.exists() for path in beside] == [True, False, False, True]


def test_a_folder_of_another_user_is_read_though_its_times_stay(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, held)

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refused)
    assert made(tmp_path, held).was_kept


def test_a_program_that_holds_what_cannot_be_told_is_compiled_as_ever(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    holder = jnp.zeros(())

    def add(left: jax.Array) -> jax.Array:
        return left + holder + jnp.float32(held)

    program = Program("add", add, ARGS[:1])
    compile_all([program], kept=ExecutableCache(tmp_path))
    assert "its executable is not kept" in caplog.text
    assert program(jax.device_put(np.zeros((4, 4), np.float32), ARGS[0].sharding)).shape == (4, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_gives_what_json_cannot_tell_is_compiled_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program("odd", gives_a_part, ARGS[:1])
    compile_all([program], kept=ExecutableCache(tmp_path))
    assert "a program that returns a Partial: its executable is not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def gives_a_part(array: jax.Array) -> Any:
    return jax.tree_util.Partial(jnp.add, array)


def test_a_program_that_cannot_leave_the_process_is_compiled_as_ever(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    array = jax.device_put(np.zeros((4, 4), np.float32), ARGS[0].sharding)
    for _ in range(2):
        program = Program("calls", calls_back, ARGS[:1])
        compile_all([program], kept=ExecutableCache(tmp_path))
        assert not program.was_kept
        assert "an executable is not kept" in caplog.text
        caplog.clear()
        np.testing.assert_array_equal(program(array), np.ones((4, 4)))


def calls_back(array: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda value: np.asarray(value) + np.float32(1), array, array)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", "gs://far/away"),
        ("jax_enable_compilation_cache", False),
    ],
)
def test_nothing_is_kept_where_jax_keeps_nothing_of_this_host(setting: str, value: Any) -> None:
    assert ExecutableCache.beside_compiled() is not None
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert ExecutableCache.beside_compiled() is None
    finally:
        jax.config.update(setting, before)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_nothing_is_kept_or_loaded_where_others_may_write(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables").chmod(mode)
    with jax_keeping_in(tmp_path):
        assert (ExecutableCache.beside_compiled() is None) == (mode != 0o755)
    assert ("another user owns" in caplog.text) == (mode != 0o755)


def test_nothing_is_loaded_from_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ExecutableCache(tmp_path)
    cache.check_owner()
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    else:
        os.chown(tmp_path, 12345, -1)  # a folder of root is for all
    with pytest.raises(PermissionError, match="another user owns"):
        cache.check_owner()


def test_nothing_is_kept_by_flags_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "/some/file")
    assert ExecutableCache.beside_compiled() is None


def test_nothing_is_kept_once_a_source_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "model" / "a.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(executables, "_ROOT", tmp_path)
    monkeypatch.setattr(executables, "_changed_since", changed_since)
    assert ExecutableCache.beside_compiled() is None
    assert "sources are newer than this process" in caplog.text


def test_each_program_is_logged_as_loaded_or_compiled(
    tmp_path: Path, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made(tmp_path, held)
    made(tmp_path, held)
    texts = [record.message for record in caplog.records if record.name == "model.programs"]
    assert texts == ["compiled 1/1 matrix", "loaded 1/1 matrix"]


@pytest.mark.parametrize(
    "tree", [1, None, (1, None, (2,)), [1, (2, [])], {"b": (1,), "a": Asks}, empty_rows(1), ()]
)
def test_the_shape_of_what_a_program_gives_is_told_in_json(tree: Any) -> None:
    structure = jax.tree.structure(tree)
    told = json.dumps(executables._shape_of(structure))
    assert executables._tree_of(json.loads(told)) == structure
