"""Keeps a run from hanging in silence: heartbeats, a monitor next to each rank, the lock of a run; no torch here."""
