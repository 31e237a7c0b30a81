"""What a backbone has learned, to look at."""
