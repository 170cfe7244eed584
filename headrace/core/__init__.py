"""The transaction core: admission, and what the engine composes: ledger, sequencing, journal, execution, egress.

Pure: no clock, no socket, no thread, no file, no pyspark. Time comes in with each event, effects go out.
"""
