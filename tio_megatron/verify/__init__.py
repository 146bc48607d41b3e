"""Compares and explains: where two sides differ, and why. Nothing that trains or serves imports it, and it changes no byte."""
