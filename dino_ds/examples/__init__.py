"""Programs to copy and change: what to do with a trained teacher. Each runs as it is, by python -m."""
