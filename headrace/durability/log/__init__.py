"""The log: records in segments, who may write them, and how a broken log is examined and repaired."""
