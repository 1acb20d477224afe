"""Encoders of a source: what comes out is encoded once, kept in a table, drawn by the Feed, and decoded."""
