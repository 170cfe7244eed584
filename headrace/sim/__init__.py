"""The deterministic simulator: the production core in a hostile world of virtual time, and what must hold in it."""
