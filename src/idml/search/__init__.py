"""Galleries of images, searched by their embeddings."""
