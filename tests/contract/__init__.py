"""One suite per interface; every implementation runs it."""
