"""`dino-ds bench ...`: measures what a step, its optimizations and its parts cost on this host."""
