"""What the papers say, sentence by sentence."""
