"""The API side: takes HTTP requests, drives them through the workers, and streams the answers."""
