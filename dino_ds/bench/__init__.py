"""`dino-ds bench ...`: what a step, its levers and its parts cost on this host."""
