"""What a user writes: apps, operators, functions, and the context that functions get. Imports no other part."""
