"""Starting a run on one or more machines: the hostfile, the checks before it, and the command that starts it."""
