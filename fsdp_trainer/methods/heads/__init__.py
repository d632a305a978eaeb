"""Methods whose head gives texts or tokens numbers: labels, scores, embeddings."""
