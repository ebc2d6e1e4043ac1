"""Adapters: one module per framework, imported only by those who use it, and the MCP server.

An adapter converts a framework's messages (`*_messages.py`) and hooks refold in. `align.py` finds where a
resent history goes on, `conversation.py` and `synced_history.py` keep it in a session.
"""
