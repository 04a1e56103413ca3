"""Checks what tests/conftest.py promises to every other test."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest


def test_eight_virtual_cpu_devices_are_there():
    assert len(jax.devices("cpu")) == 8


def test_mixing_dtypes_raises():
    with pytest.raises(ValueError, match="dtype"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)


def test_processes_of_tests_hear_ctrl_c_even_if_the_tests_are_a_background_job_of_a_script():
    job = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import subprocess, sys
import tests.conftest
print(subprocess.call([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGINT)"]))
"""
    done = subprocess.run([sys.executable, "-c", job], capture_output=True, text=True, check=False)
    assert done.stdout == "-2\n", done.stderr


def test_compiled_programs_are_kept_on_disk():
    assert jax.config.jax_compilation_cache_dir
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
