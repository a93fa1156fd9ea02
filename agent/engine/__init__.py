"""What the hook needs from an engine (`port`), and the engines."""
