"""Snapshots: the state at the end of an epoch, as layers of Arrow files under a manifest."""
