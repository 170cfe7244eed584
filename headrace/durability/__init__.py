"""Durability: the log, snapshots, stores and recovery. Knows the core; drives it; does all file and object I/O."""
