"""Sources of engines that are looked at while the router runs."""
