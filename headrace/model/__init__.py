"""What a user writes: apps, operators, functions, and the context they are handed. Knows nobody."""
