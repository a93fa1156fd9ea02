"""Generated protocol code: made by `make proto`, never edited."""
