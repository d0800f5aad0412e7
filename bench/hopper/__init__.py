"""A real engine on a real GPU that is lent for minutes and has no network: everything is prepared and carried."""
