"""What breaks the rules of a provider, mended in the request; the record keeps what came."""
