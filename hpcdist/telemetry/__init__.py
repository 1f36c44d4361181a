"""Telemetry: what a run did, kept in its directory: metrics, provenance, reports, and what hung."""
