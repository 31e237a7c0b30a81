"""Who gives the student its targets."""
