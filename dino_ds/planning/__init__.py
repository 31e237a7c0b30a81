"""Plans of runs: what one needs, and how fast it would be, before there is a GPU."""
