"""The test kit, and users' apps in the simulator."""
