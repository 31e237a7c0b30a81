"""`dino-ds bench ...`: measures the cost of a step, of its optimizations and of its parts on this host."""
