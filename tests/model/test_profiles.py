"""Profiles of this process: one at a time, in folders of their own, and never without an end."""

import asyncio
from pathlib import Path

import jax
import pytest

from model.errors import ProfileError
from model.profiles import Profiler
from tests.recording import until


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.xplane.pb") if path.stat().st_size]


async def test_a_profile_shows_what_ran_between_its_start_and_its_stop(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), 60.0)
    for name in ("127.0.0.1:1", "../away"):
        folder = await profiler.start(name)
        assert folder.parent == tmp_path
        with jax.profiler.TraceAnnotation(f"seen by {name}"):
            pass
        assert await profiler.stop() == folder
        [file] = written(folder)
        assert f"seen by {name}".encode() in file.read_bytes()


async def test_a_second_profile_waits_for_the_first_to_end(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), 60.0)
    first = await profiler.start("a")
    with pytest.raises(ProfileError, match=f"the profile in {first} has not ended yet"):
        await profiler.start("b")
    await profiler.stop()
    assert await profiler.start("b") != first
    await profiler.stop()


async def test_a_forgotten_profile_ends_by_itself_and_is_told_once(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), 0.01)
    folder = await profiler.start("a")
    await until(lambda: bool(written(folder)))
    assert await profiler.stop() == folder
    with pytest.raises(ProfileError, match="no profile has begun"):
        await profiler.stop()


async def test_all_that_ask_for_the_end_wait_until_it_is_written(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), 60.0)
    folder = await profiler.start("a")
    assert {*await asyncio.gather(profiler.stop(), profiler.stop())} == {folder}
    assert written(folder)


async def test_one_that_asks_for_the_end_and_leaves_takes_nothing_along(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path), 60.0)
    folder = await profiler.start("a")
    leaving = asyncio.create_task(profiler.stop())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await profiler.stop() == folder
    assert written(folder)


async def test_what_cannot_be_written_is_an_error_and_the_next_profile_is_free_to_begin(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_text("a file where the folder should be")
    profiler = Profiler(str(tmp_path), 60.0)
    with pytest.raises(ProfileError, match=r"no profile can begin in .*/a: .*File exists"):
        await profiler.start("a")
    with pytest.raises(ProfileError, match="no profile has begun"):
        await profiler.stop()
    await profiler.start("b")
    await profiler.stop()


async def test_a_profile_that_found_no_room_on_the_disk_is_written_before_the_next_one_begins(
    tmp_path: Path,
) -> None:
    profiler = Profiler(str(tmp_path), 60.0)
    folder = await profiler.start("a")
    (folder / "plugins").write_text("a file where a folder should be, as little use as a full disk")
    with pytest.raises(ProfileError, match=f"the profile in {folder} could not be written: "):
        await profiler.stop()
    with pytest.raises(ProfileError, match=f"in .*/b: the one in {folder} could not be written: "):
        await profiler.start("b")
    (folder / "plugins").unlink()
    later = await profiler.start("b")
    assert written(folder)
    assert await profiler.stop() == later
    assert written(later)


async def test_without_a_folder_every_profile_is_refused() -> None:
    with pytest.raises(ProfileError, match="started without --profile-dir"):
        await Profiler("", 60.0).start("a")
