"""What only the account can say about a cluster: offerings, quotas, reservations, prices, and what is left of it."""
