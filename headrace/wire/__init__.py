"""What is sent and stored: values, messages and the one codec. Imports no other part. Never uses pickle."""
