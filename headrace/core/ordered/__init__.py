"""The ordered mode: one worker's part of epochs whose transactions are spread over several workers."""
