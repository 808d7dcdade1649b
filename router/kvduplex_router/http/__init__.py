"""A small pooled HTTP/1.1 client and an SSE framer, made for proxying."""
