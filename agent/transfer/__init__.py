"""Moving expert weights: staging, and one file for each way to copy between ranks."""
