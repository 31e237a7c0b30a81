"""What a run needs and how fast it would be, before there is a GPU."""
