"""Commands that look after data and results, around training."""
