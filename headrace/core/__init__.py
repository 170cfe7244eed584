"""The transaction core: ingress, sequencing, execution, egress, composed by the engine.

Pure: no clock, no socket, no thread, no file, no pyspark. Time comes in with each event, effects go out.
"""
