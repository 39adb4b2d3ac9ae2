"""The names of what is in a node's state directory, whichever room writes it."""

SESSION = "session"  # by which the node comes back as the same one
