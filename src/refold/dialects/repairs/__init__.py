"""Changes to a request that an API would refuse otherwise, one file per API."""
