"""What a step costs, by arithmetic. No torch: help and plans must be quick."""
