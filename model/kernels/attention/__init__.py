"""Paged attention: one plain reference, and the backends that must agree with it."""
