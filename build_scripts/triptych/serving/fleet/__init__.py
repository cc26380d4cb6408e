"""Run several servers behind Envoy: its configuration, its process, and updates of replicas.

Envoy balances the requests. This package sends models only the requests of the health check.
"""
