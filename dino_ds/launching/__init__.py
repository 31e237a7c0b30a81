"""Starting a run on one or more machines: the hostfile, what is checked before, and the command that starts it."""
