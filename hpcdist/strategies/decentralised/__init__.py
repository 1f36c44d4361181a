"""Decentralised training: replicas that differ, and are brought together by their neighbours or from time to time."""
