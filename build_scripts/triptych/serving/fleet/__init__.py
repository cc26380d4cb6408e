"""Several real servers behind a real Envoy: its settings, its process, and who replaces whom.

It balances nothing itself and asks no model but for the question of its health check.
"""
