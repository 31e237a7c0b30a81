"""A run: what it is made of, its step and its loop, what it says of itself."""
