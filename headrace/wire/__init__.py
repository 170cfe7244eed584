"""What travels: values, messages and the one codec. Knows nobody; no pickle, ever."""
