"""HTTP in, requests through, bytes out."""
