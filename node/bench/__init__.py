"""`atoll bench allreduce` and `atoll bench recovery`: real processes of a node, and their figures."""
