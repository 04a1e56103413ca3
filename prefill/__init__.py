"""Prompt in, pages of keys and values out."""
