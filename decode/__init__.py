"""Pages in, tokens out."""
