"""The data room: sources → conversations → tokens and mask → store → packing → global order.

Knows no model and no torch.
"""
