"""Measurements: workloads, clients, rows and their comparison."""
