"""A seeded campaign of faults against a whole system of real processes."""
