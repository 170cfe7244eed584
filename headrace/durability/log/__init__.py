"""The log: records in segments, which process may write them, and how a broken log is examined and repaired."""
