"""Runs policies in a bounded process of their own."""
