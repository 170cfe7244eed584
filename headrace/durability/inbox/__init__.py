"""The inbox: batches of calls that arrive as files."""
