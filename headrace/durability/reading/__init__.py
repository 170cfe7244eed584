"""Reading a store without writing to it: past epochs, views and scans of state."""
