"""Plans from files, with nothing else running."""
