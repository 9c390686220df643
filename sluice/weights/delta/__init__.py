"""Lossless differences between versions of a shard file."""
