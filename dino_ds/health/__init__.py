"""A run never hangs in silence: heartbeats, the watcher of each rank, the lock of a run folder, collapse alarms.

Nothing here needs torch: the watcher is a process of its own that must start at once and cost nothing.
"""
