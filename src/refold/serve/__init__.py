"""The service: a gateway for any agent, an API, live events and a panel."""
