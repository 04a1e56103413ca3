"""The whole system, played from one seed."""
