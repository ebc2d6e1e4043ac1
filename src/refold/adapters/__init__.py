"""Adapters: one module per framework, imported only by those who use it, and the MCP server.

An adapter is a converter between a framework's messages and ours, and a hook that fits each call of a model.
`conversation.py` records the framework's history, and fits what is sent.
"""
