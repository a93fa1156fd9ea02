"""Programs and models that show the project at work; nothing in the service or the agent imports them."""
