"""Data: sources → conversations → tokens and loss weights → store → packing → global row order.

Imports neither a model nor torch.
"""
