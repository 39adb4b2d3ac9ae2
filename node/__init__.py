"""A volunteer's machine: the daemon, its trainer and the state they share."""
