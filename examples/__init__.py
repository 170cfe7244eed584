"""Small real apps, each run by a test."""
