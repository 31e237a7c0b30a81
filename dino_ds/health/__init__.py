"""Keeps a run from hanging in silence: heartbeats, a monitor process next to each rank, the lock of a run folder.
Nothing here needs torch: a monitor process must start at once and cost nothing."""
