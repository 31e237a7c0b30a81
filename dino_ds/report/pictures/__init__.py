"""Pictures of what a backbone has learned."""
