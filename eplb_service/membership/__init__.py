"""Who belongs to a deployment's vote group, and what they must agree on. Pure."""
