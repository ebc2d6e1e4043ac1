"""The service: a gateway that any agent can point its base URL at, an HTTP API, live events and the panel.

`run.py` starts it, `app.py` is the application. `gateway.py` handles a request: `identify.py` finds its
conversation, `recorder.py` stores and fits it, `streaming.py` passes the answer on. `api.py` is the API.
"""
