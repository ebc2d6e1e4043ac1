"""The service: a gateway that any agent can point its base URL at, an HTTP API, live events and the panel.

`run.py` starts it, `app.py` is the application, and `guard.py` stands before all routes. `gateway.py` handles
a request: `incoming.py` reads it, `recorder.py` finds its conversation, records and fits it, `streaming.py`
passes the answer on. `api.py` is the API, `events.py` the live events.
"""
