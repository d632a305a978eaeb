"""The data room: sources → conversations → tokens and mask → token store → packing plan → global order. Knows no model and no torch."""
