"""Tests of the kernels."""
