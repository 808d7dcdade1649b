"""One page that shows a router and its fleet, live."""
