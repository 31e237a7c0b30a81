"""Plans of runs: what one needs, before there is a GPU."""
