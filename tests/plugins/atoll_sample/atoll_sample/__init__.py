"""A sample of Atoll's plugins: each part in a module of its own, so that who needs one imports no other."""
